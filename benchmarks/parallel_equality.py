"""Tokens over ranks and stages against those of one process, in float32, for every bundled model family.

    OMP_NUM_THREADS=1 python benchmarks/parallel_equality.py [--model NAME ...] [--layout "PP 2" ...] [--executor ray]

Tiny random models are made on the spot. Each runs greedily in one process (executor `cpu`, ample memory, whole prompts,
no drafts), and then over each layout of worker processes, one engine for three settings:

- plain: a few short requests, whose prompts and memory fit;
- tight: all requests, in chunks of at most 24 tokens, with the prefix cache, and memory for a part of them, so that
  some are preempted; twice, so that the second run finds prefixes;
- drafts: as tight, and every request with n-gram drafts.

"equal" means all token ids of all requests. The counts after it show that the setting did its work: preempted
requests, prompt tokens from the cache, tokens drafted and accepted. Encoders generate nothing: their embeddings are
compared, to four digits. Exits with 1 where anything differs; a layout that is refused is named with the reason.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.outputs import RequestOutput
from dovetail.testing.tiny_encoders import save_tiny_encoder
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

LAYOUTS: Final = {"TP 2": (2, 1), "PP 2": (1, 2), "PP 2 x TP 2": (2, 2)}
"""Tensor parallel ranks and pipeline stages."""
LONGEST: Final = 96
NUM_TOKENS: Final = 24
SHARED: Final = list(range(3, 40))
"""What several prompts begin with."""
SHORT: Final = [[7, 8, 9, 7, 8, 9, 7, 8], [100, 4], [2, 4, 8, 16, 32, 64]]
PROMPTS: Final = [
    *SHORT,
    [*SHARED, 5, 9, 33, 70],
    [*SHARED, 12, 90],
    [61] * 20,
    list(range(60, 3, -1)),
    [*SHARED[:20], 110],
]


@dataclass(frozen=True)
class Model:
    """A tiny model of a bundled family."""

    family: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    """Beside the sizes of `tiny_config`."""
    num_blocks: int = 48
    """Memory for a part of the requests."""

    def save(self, folder: Path) -> None:
        """Writes config.json and the weights."""
        if self.is_encoder:
            save_tiny_encoder(folder, self.model_type, **self.config)
        else:
            save_tiny_model(folder, tiny_config(self.model_type, **self.config))

    @property
    def is_encoder(self) -> bool:
        """Whether it fills no text."""
        return self.family == "bert"


_MPT = {"d_model": 64, "n_heads": 4, "n_layers": 3}
MODELS: Final = {
    "llama": Model("llama", "llama", {"num_hidden_layers": 3}),
    # One key head is copied to both ranks, and 127 tokens leave the second rank a row short.
    "llama, odd sizes": Model(
        "llama", "llama", {"num_key_value_heads": 1, "vocab_size": 127, "attention_bias": True, "mlp_bias": True}
    ),
    "mistral, window": Model("llama", "mistral", {"sliding_window": 24}, num_blocks=30),
    "qwen2, tied": Model("llama", "qwen2", {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    "qwen3": Model("llama", "qwen3"),
    "gemma2": Model("gemma", "gemma2"),
    "gemma3": Model("gemma", "gemma3_text", num_blocks=92),
    "mixtral, window": Model("moe", "mixtral", {"sliding_window": 24}, num_blocks=30),
    "qwen2_moe": Model("moe", "qwen2_moe", {"num_hidden_layers": 3}),
    "qwen3_moe": Model("moe", "qwen3_moe", {"mlp_only_layers": [0]}),
    "llama4": Model("llama4", "llama4_text", num_blocks=72),
    "deepseek_v2": Model("deepseek", "deepseek_v2", {"num_hidden_layers": 3}),
    "deepseek_v3": Model("deepseek", "deepseek_v3", {"num_hidden_layers": 3}),
    "bloom": Model("layernorm", "bloom", {"n_layer": 3, "n_head": 4}),
    "falcon": Model("layernorm", "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "mpt": Model("layernorm", "mpt", _MPT),
    "gptj": Model("layernorm", "gptj", {"rotary_dim": 8}),
    "stablelm": Model("layernorm", "stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "gpt2": Model("transformers", "gpt2"),
    "bert": Model("bert", "bert"),
}


@dataclass(frozen=True)
class Run:
    """Of one setting."""

    results: list[list[Any]]
    """Token ids of each request; of encoders, embeddings."""
    counts: str
    """What shows that the setting did its work."""


class Checker:
    """Runs one model over layouts."""

    def __init__(self, model: Model, folder: Path, executor: str):
        self._model = model
        self._folder = folder
        self._executor = executor

    def expected(self) -> list[list[Any]]:
        """Of one process."""
        memory = {"num_blocks": 600, "prefix_caching": False}
        with self._engine("cpu", (1, 1), cache=memory, scheduler={"max_num_batched_tokens": 512}) as llm:
            return self._run(llm, PROMPTS).results

    def cells(self, layout: tuple[int, int], expected: list[list[Any]]) -> list[str]:
        """For each setting "equal" or what differs, and the counts."""
        drafter = {"name": "ngram", "num_tokens": 3, "min_match": 1, "length": "fixed"}
        tight = {
            "cache": {"num_blocks": self._model.num_blocks, "prefix_caching": True},
            "scheduler": {"max_num_batched_tokens": 24},
            "speculative": {"drafters": {"lookup": drafter}, "default": None},
        }
        with self._engine(self._executor, layout, **tight) as llm:
            if self._model.is_encoder:
                return [compared(self._run(llm, PROMPTS), expected), "", ""]
            plain = compared(self._run(llm, SHORT), expected[: len(SHORT)])
            cold, warm = self._run(llm, PROMPTS), self._run(llm, PROMPTS)
            tight_cell = compared(Run(cold.results + warm.results, warm.counts), expected * 2)
            return [plain, tight_cell, compared(self._run(llm, PROMPTS, "lookup"), expected)]

    @contextmanager
    def _engine(self, executor: str, layout: tuple[int, int], **sections: dict[str, Any]) -> Iterator[LLM]:
        config: dict[str, Any] = {
            "model": {"path": str(self._folder), "tokenizer_mode": "none", "dtype": "float32"},
            "executor": {"name": executor, "threads": 1, "tensor_parallel": layout[0], "pipeline_parallel": layout[1]},
            "cache": {"block_size": 4, "num_blocks": 600},
            "scheduler": {"max_num_seqs": 8},
        }
        config["model"] |= {"family": self._model.family, "max_model_len": LONGEST}
        if self._model.is_encoder:  # which keeps no pages
            del config["cache"]
            sections = {}
        for name, section in sections.items():
            config[name] = config.get(name, {}) | section
        with LLM(**config) as llm:
            yield llm

    def _run(self, llm: LLM, prompts: list[list[int]], drafter: str | None = None) -> Run:
        if self._model.is_encoder:
            vectors = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
            return Run([[round(value, 4) for value in vector] for vector in vectors], "")
        asked = {} if drafter is None else {"speculation": drafter}
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **asked)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return Run([list(output.outputs[0].token_ids) for output in outputs], counts(outputs))


def counts(outputs: Sequence[RequestOutput]) -> str:
    """Preempted, cached, drafted and accepted."""
    metrics = [output.metrics for output in outputs]
    found = {
        "preempted": sum(one.num_preemptions for one in metrics),
        "cached": sum(output.num_cached_tokens for output in outputs),
        "drafted": sum(one.num_drafted for one in metrics),
        "accepted": sum(one.num_accepted for one in metrics),
    }
    return ", ".join(f"{name} {count}" for name, count in found.items() if count)


def compared(run: Run, expected: list[list[Any]]) -> str:
    """A cell."""
    wrong = [number for number, (a, b) in enumerate(zip(run.results, expected, strict=True)) if a != b]
    words = [f"DIFFERS: requests {wrong}" if wrong else "equal", *([run.counts] if run.counts else [])]
    return "; ".join(words)


def check_model(name: str, layouts: Sequence[str], executor: str) -> bool:
    """Prints a row per layout. Returns whether everything is equal."""
    model, fine = MODELS[name], True
    with tempfile.TemporaryDirectory() as directory:
        model.save(Path(directory))
        checker = Checker(model, Path(directory), executor)
        expected = checker.expected()
        for layout in layouts:
            started = time.perf_counter()
            try:
                cells = checker.cells(LAYOUTS[layout], expected)
            except ConfigError as error:
                cells = [f"refused: {' '.join(str(error).split()).rpartition(' - ')[2]}", "", ""]
            fine = fine and not any("DIFFERS" in cell for cell in cells)
            seconds = time.perf_counter() - started
            print(f"| {name} ({model.family}) | {layout} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)
    return fine


def start_ray() -> None:
    """Starts a cluster on this machine, with CPUs for the ranks of every layout, which engines find by
    themselves."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--layout", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--executor", default="multiproc", help="multiproc; ray: over a cluster on this machine")
    given = parser.parse_args()
    if given.executor == "ray":
        start_ray()
    print("| model (family) | layout | plain | tight | drafts | s |")
    print("| --- | --- | --- | --- | --- | --- |")
    fine = [check_model(name, given.layout, given.executor) for name in given.model]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    raise SystemExit(main())
