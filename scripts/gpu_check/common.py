"""What the parts of the GPU check share: arguments, the model, measured limits of the machine, and how results are
printed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "torch_dtype": "bfloat16",
}
TINY: dict[str, Any] = LLAMA_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}


@dataclass
class Report:
    """Rows of one part. Each is printed, and appended to OUT/part.jsonl, when it is known; all are written as JSON at
    the end, which a part that is stopped does not reach."""

    part: str
    out: Path
    null: bool
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{self.part}.jsonl").write_text("")

    def add(self, what: str, value: Any, unit: str = "", *, goal: str = "", good: bool | None = None) -> None:
        """One result; `good` says whether it is right, or reaches the goal (never judged in the dry mode)."""
        if self.null and goal:
            good = None
        row = {"what": what, "value": value, "unit": unit, "goal": goal, "good": good}
        self.rows.append(row)
        with (self.out / f"{self.part}.jsonl").open("a") as file:
            file.write(json.dumps({"part": self.part, "dry": self.null, **row}) + "\n")
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        mark = {True: "ok", False: "FAIL", None: ""}[good]
        print(f"{self.part:11} {what:52} {shown:>12} {unit:12} {goal:26} {mark}", flush=True)

    def write(self) -> None:
        """To OUT/part.json."""
        content = {"part": self.part, "dry": self.null, "device": device_name(self.null), "rows": self.rows}
        (self.out / f"{self.part}.json").write_text(json.dumps(content, indent=1))

    @property
    def failed(self) -> bool:
        """Whether something was wrong or missed its goal."""
        return any(row["good"] is False for row in self.rows)


@dataclass(frozen=True)
class Arguments:
    """What the parts are told."""

    null: bool
    out: Path
    model: str | None
    """A small real model for comparing tokens."""

    @property
    def device(self) -> str:
        """torch device."""
        return "cpu" if self.null else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return torch.float32 if self.null else torch.bfloat16


def run(part: str, body: Callable[[Report, Arguments], None]) -> None:
    """Runs one part and exits with 1 where something failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--null", action="store_true", help="dry run on the CPU, with a tiny model")
    parser.add_argument("--out", type=Path, default=Path("gpu_check_results"))
    parser.add_argument("--model", help="a small real model, for comparing tokens")
    given = parser.parse_args()
    arguments = Arguments(given.null, given.out, given.model)
    report = Report(part, arguments.out, arguments.null)
    started = time.perf_counter()
    try:
        body(report, arguments)
    except Exception as error:
        report.add(f"{type(error).__name__}: {error}"[:200], "raised", good=False)
        import traceback

        traceback.print_exc()
    report.add("time of this part", time.perf_counter() - started, "s")
    report.write()
    sys.exit(1 if report.failed else 0)


def device_name(null: bool) -> str:
    """Of the machine that was measured."""
    return "null device (CPU)" if null else torch.cuda.get_device_name()


def synchronize(device: str) -> None:
    """Waits for a GPU."""
    if device != "cpu":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], Any], device: str, least: float = 0.2, repeats: int = 5) -> float:
    """Median seconds of one call, after a warm-up; calls are grouped so that a sample takes `least` seconds in all."""
    work()
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    count = max(1, int(least / repeats / max(time.perf_counter() - started, 1e-7)))
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(count):
            work()
        synchronize(device)
        samples.append((time.perf_counter() - started) / count)
    return sorted(samples)[repeats // 2]


def device_seconds(works: Sequence[Callable[[], Any]], device: str, least: float = 0.02, repeats: int = 9) -> float:
    """Median seconds of one call, without the host's time: on a GPU calls are captured and replayed, as decode steps
    are. Several works that read tensors of their own take turns, so that none finds its tensors in the cache."""
    if device == "cpu":
        return seconds_of(lambda: [work() for work in works], device) / len(works)
    for work in works:
        work()
    torch.cuda.synchronize()
    count = 1
    while True:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                for work in works:
                    work()
        took = sorted(_replay_seconds(graph) for _ in range(repeats))[repeats // 2]
        if took > least / 4 or count >= 256:
            return took / (count * len(works))
        count *= 4


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def copy_bandwidth(arguments: Arguments) -> float:
    """Bytes per second that a copy within the device moves, reads and writes counted."""
    size = 2**22 if arguments.null else 2**31
    source = torch.zeros(size, dtype=torch.uint8, device=arguments.device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), arguments.device)


def matmul_rate(arguments: Arguments) -> float:
    """Floating-point operations per second of a large product."""
    size = 256 if arguments.null else 8192
    a = torch.randn(size, size, device=arguments.device).to(arguments.dtype)
    b = torch.randn(size, size, device=arguments.device).to(arguments.dtype)
    return 2 * size**3 / seconds_of(lambda: a @ b, arguments.device)


def model_config(arguments: Arguments) -> dict[str, Any]:
    """Of the model of random weights."""
    return dict(TINY if arguments.null else LLAMA_8B)


def engine_sections(arguments: Arguments, directory: Path, **executor: Any) -> dict[str, Any]:
    """A config for the model of random weights in `directory` (made by `random_model`)."""
    dtype = str(arguments.dtype).removeprefix("torch.")
    chosen: dict[str, Any] = {"name": f"{HERE / 'timed.py'}:TimedExecutor", **executor}
    sections: dict[str, Any] = {
        "model": {
            "path": str(directory),
            "tokenizer_mode": "none",
            "dtype": dtype,
            "weight_format": f"{HERE / 'random_weights.py'}:RandomWeights",
        },
        "executor": chosen,
        "scheduler": {"max_num_seqs": 8 if arguments.null else 256},
    }
    if arguments.null:
        chosen |= {"device": "null"}
        sections |= {"device": "cpu", "attention": "reference", "cache": {"num_blocks": 400}}
        sections["scheduler"]["max_num_batched_tokens"] = 128
    else:
        # Sizes that are named are refused where they cannot be captured; "auto" would run eagerly and only warn.
        chosen.setdefault("cuda_graphs", [1, 8, 64, 256])
        # A step of 256 decodes and the rest of a prompt; larger steps leave less to the KV cache.
        sections["scheduler"]["max_num_batched_tokens"] = 8192
    return sections


@contextmanager
def random_model(arguments: Arguments) -> Iterator[Path]:
    """A directory that holds the config of the model of random weights."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(model_config(arguments)))
        yield directory
