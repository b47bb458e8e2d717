"""Compares plugins of examples/plugins with the bundled ones of their kinds, in the environment where both are
installed. Run by scripts/example_wheels.py.

python compare_examples.py [--turns N] FOLDER...    the compare.yaml of each folder: one folder alone, several together

For each executor, two engines that differ in the plugin take turns over the same requests. Prints a JSON line for each:
whether the tokens are equal, and the output tokens per second of both: the median of N turns (3 where it is not given)
after one that warms up; with 0 turns of that one, which shows no more than that it runs. Exit code 1 where tokens
differ that must not.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import DovetailError
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

Config = dict[str, Any]

SIZES: Mapping[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
EXECUTORS: Mapping[str, Sequence[Config]] = {
    "cpu": [{"name": "cpu", "threads": 1}],
    # One rank where a plugin of the pair cannot be split.
    "multiproc": [
        {"name": "multiproc", "threads": 1, "tensor_parallel": 2},
        {"name": "multiproc", "threads": 1},
    ],
}
NUM_TOKENS = 48


def merged(*parts: Mapping[str, Any]) -> Config:
    """The sections of all, the later ones over the earlier ones."""
    result: Config = {}
    for part in parts:
        for key, value in part.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else value
    return result


def requests() -> tuple[list[Any], list[SamplingParams]]:
    """24 requests of two tenants for eight places: prompts of 20 to 180 tokens that repeat themselves, some with a
    common beginning."""
    draw = Random(0)
    common = [draw.randrange(3, 2000) for _ in range(64)]
    prompts, params = [], []
    for number in range(24):
        phrase = [draw.randrange(3, 2000) for _ in range(draw.randrange(5, 30))]
        prompts.append({"prompt_token_ids": (common if number % 3 == 0 else []) + phrase * 4})
        extra = {"tenant": "few" if number % 6 == 5 else "many"}
        params.append(SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, extra=extra))
    return prompts, params


class Turn:
    """One engine, which generates for the same requests again and again."""

    def __init__(self, llm: LLM):
        self._llm = llm
        self._prompts, self._params = requests()
        self.tokens: list[list[int]] = []
        self.speeds: list[float] = []

    def take(self) -> None:
        """The prefix cache is emptied first, so that turns are alike."""
        self._llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = self._llm.generate(self._prompts, self._params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        self.tokens = [list(output.outputs[0].token_ids) for output in outputs]
        self.speeds.append(sum(map(len, self.tokens)) / elapsed)


@contextmanager
def receiver(port: int | None) -> Iterator[list[int]]:
    """Sizes of the datagrams that came to a UDP port, once the block has ended."""
    sizes: list[int] = []
    if port is None:
        yield sizes
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        opened.bind(("127.0.0.1", port))
        opened.setblocking(False)
        yield sizes
        try:
            while True:
                sizes.append(len(opened.recv(65536)))
        except BlockingIOError:
            pass


def measure(
    base: Config, bundled: Config, ours: Config, executors: Sequence[Config], num_turns: int
) -> tuple[Config, Turn, Turn]:
    """The executor's section that served both, and their turns, after one that warms up. A section that one of them
    refuses gives way to the next."""
    for number, executor in enumerate(executors):
        with ExitStack() as stack:
            try:
                pair = [
                    Turn(stack.enter_context(LLM(**merged(base, {"executor": executor}, part))))
                    for part in (bundled, ours)
                ]
            except DovetailError as error:
                if number == len(executors) - 1:
                    raise
                print(f"{executor}: {error}", file=sys.stderr)
                continue
            for _ in range(1 + num_turns):
                for turn in pair:
                    turn.take()
            return executor, pair[0], pair[1]
    raise AssertionError("no executor")


def report(what: str, executor: Config, bundled: Turn, ours: Turn, must_be_equal: bool) -> bool:
    """Prints the line; whether the tokens are as they must be."""
    rows = zip(ours.tokens, bundled.tokens, strict=True)
    pairs = [pair for mine, theirs in rows for pair in zip(mine, theirs, strict=True)]
    equal = sum(mine == other for mine, other in pairs) / len(pairs)
    values = {
        "what": what,
        "executor": executor["name"],
        "ranks": executor.get("tensor_parallel", 1),
        "equal": equal,
        "bundled": statistics.median(bundled.speeds[1:] or bundled.speeds),
        "ours": statistics.median(ours.speeds[1:] or ours.speeds),
    }
    print(json.dumps(values), flush=True)
    return equal == 1 or not must_be_equal


def pairs_of(compared: Mapping[str, Config]) -> Iterator[tuple[str, Config, Config, bool]]:
    """(what, bundled sections, sections of the plugin, whether tokens must be equal)."""
    if len(compared) == 1:
        ((name, only),) = compared.items()
        yield name, only["bundled"], only["ours"], only["tokens"] == "equal"
        return
    lossless = [each for each in compared.values() if each["tokens"] == "equal"]
    bundled, ours = (merged(*(each[which] for each in lossless)) for which in ("bundled", "ours"))
    yield "together, of equal tokens", bundled, ours, True
    # What changes tokens stays in both, and so does a family, which decides what it goes together with.
    fixed = [each["ours"] for each in compared.values() if each["tokens"] != "equal" or "architecture" in each]
    others = [each["bundled"] for each in compared.values() if each["tokens"] == "equal" and "architecture" not in each]
    # Sums of other orders differ by more than a tie in less than float32.
    exact = {"model": {"dtype": "float32"}}
    everything = merged(*(each["ours"] for each in compared.values()), exact)
    yield "all together", merged(*others, *fixed, exact), everything, True


def read_comparison(folder: Path, answers: Path) -> Config:
    """What compare.yaml says; `{folder}` in it is the folder that it lies in, and `{answers}` a file of the token ids
    that the model answers, as numpy writes them."""
    text = (folder / "compare.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text.replace("{folder}", folder.as_posix()).replace("{answers}", answers.as_posix()))


def write_answers(base: Config, path: Path) -> None:
    """All tokens that the model answers to the requests, without any of the plugins."""
    with LLM(**merged(base, {"executor": EXECUTORS["cpu"][0]})) as llm:
        turn = Turn(llm)
        turn.take()
    np.save(path, np.array([token for tokens in turn.tokens for token in tokens], dtype=np.int32))


def main(folders: Sequence[Path], num_turns: int) -> int:
    """Exit code."""
    is_right = True
    with tempfile.TemporaryDirectory() as directory:
        answers = Path(directory, "answers.npy")
        compared = {folder.name: read_comparison(folder, answers) for folder in folders}
        ports = [each["receives_udp"] for each in compared.values() if "receives_udp" in each]
        architectures = {each["architecture"] for each in compared.values() if "architecture" in each} or {"llama"}
        (architecture,) = architectures
        model = Path(directory, "model")
        save_tiny_model(model, tiny_config(architecture, **SIZES))
        base = {
            "model": {"path": str(model), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 320},
            "cache": {"block_size": 16, "num_blocks": 400},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 256},
        }
        write_answers(base, answers)
        for what, bundled, ours, must_be_equal in pairs_of(compared):
            for executors in EXECUTORS.values():
                with receiver(ports[0] if ports else None) as sizes:
                    measured = measure(base, bundled, ours, executors, num_turns)
                is_right &= report(what, *measured, must_be_equal)
                if ports and not sizes:
                    print(f"{what}: nothing came to port {ports[0]}", file=sys.stderr)
                    is_right = False
    return 0 if is_right else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--turns", type=int, default=3, metavar="N")
    given = parser.parse_args()
    sys.exit(main(given.folders, given.turns))
