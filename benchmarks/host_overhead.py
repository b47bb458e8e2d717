"""Host time per generated token, over an executor that returns random tokens at once.

What is left is the engine: scheduler, KV memory, plans, commits, detokenization and outputs.

    python benchmarks/host_overhead.py [--batch 1 32 256] [--tokens 256] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from dovetail import LLMEngine, SamplingParams
from dovetail.contracts.executor import Executor, ExecutorCapabilities, Placement, WorkerReport
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.engine.remote.messages import Update, encode
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

VOCAB_SIZE = 256


class RandomTokens(Executor):
    """Answers every plan with random tokens, without a worker."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = ExecutorCapabilities(device_types=frozenset({"cpu"}))

    def start(self) -> None:
        """Draws the tokens in advance, so that a step pays for none."""
        draw = random.Random(0)
        self._tokens = [draw.randrange(3, VOCAB_SIZE) for _ in range(4096)]
        self._lengths: dict[int, int] = {}

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """One token for each request whose prompt is complete after this plan."""
        missing = False
        for request in plan.new_requests:
            self._lengths[request.seq_id] = len(request.token_ids) - request.num_computed_tokens
            missing = True
        counts = None
        if missing or any(count > 1 for count in plan.num_tokens):
            counts = []
            for seq_id, count in zip(plan.seq_ids, plan.num_tokens, strict=True):
                self._lengths[seq_id] -= count
                counts.append(int(self._lengths[seq_id] <= 0))
                if counts[-1]:
                    self._lengths[seq_id] = 1
        size = sum(counts) if counts is not None else len(plan.seq_ids)
        future: Future[StepResult] = Future()
        future.set_result(StepResult(plan.step_id, self._tokens[:size], counts))
        return future

    def call(self, method: str, *args: Any) -> list[Any]:
        """A small cache, and the plugin set of this process."""
        if method == "describe":
            spec = KVSpec(num_kv_heads=1, head_size=16, dtype="float32")
            return [WorkerReport(placement=Placement(device="cpu"), caches=(spec,), available_bytes=1 << 30)]
        if method == "plugin_hash":
            return [self.spec.config.plugin_hash]  # type: ignore[attr-defined]
        return [None]

    def shutdown(self) -> None:
        """Holds nothing."""


def save_byte_tokenizer(directory: Path) -> None:
    """A tokenizer with one token per byte, so that outputs have text to be made."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: token for token, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(directory / "tokenizer.json"))


def create_engine(model: Path, batch: int) -> LLMEngine:
    """An engine whose executor is `RandomTokens`."""
    return LLMEngine.from_config(
        model={"path": str(model), "dtype": "float32", "max_model_len": 512},
        executor={"name": f"{Path(__file__).resolve()}:RandomTokens"},
        cache={"memory_gib": 1.0, "prefix_caching": True},
        scheduler={"max_num_seqs": max(batch, 1), "max_num_batched_tokens": 8192},
    )


def measure(engine: LLMEngine, batch: int, num_tokens: int, output_kind: str) -> float:
    """Microseconds of host time per generated token."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0, output_kind=output_kind)
    draw = random.Random(batch)
    for index in range(batch):
        prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(32)]
        engine.add_request(f"{output_kind}-{time.monotonic_ns()}-{index}", prompt, params)
    engine.step()  # the prompts
    started = time.perf_counter()
    generated = 0
    while engine.has_unfinished_requests():
        engine.step()
        generated += batch
    return 1e6 * (time.perf_counter() - started) / generated


def measure_updates(engine: LLMEngine, batch: int, num_tokens: int) -> float:
    """As `measure`, of what an engine's process does for clients that stream: one encoded update per step, no text."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0, output_kind="delta")
    draw = random.Random(batch)
    for index in range(batch):
        prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(32)]
        engine.tokens.add_request(f"update-{time.monotonic_ns()}-{index}", engine.process_input(prompt, params))
    engine.tokens.step()  # the prompts
    started = time.perf_counter()
    generated = 0
    while engine.has_unfinished_requests():
        update = engine.tokens.step()
        assert update is not None
        encode(Update(update))
        generated += batch
    return 1e6 * (time.perf_counter() - started) / generated


def main() -> None:
    """Prints the table, and the profile of the largest batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print the ten functions that take most time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        save_tiny_model(model, tiny_config("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=512))
        save_byte_tokenizer(model)
        print("| batch | outputs | us per generated token (median, min-max) |\n| --- | --- | --- |")
        for batch in arguments.batch:
            with create_engine(model, batch) as engine:
                for kind in ("final_only", "delta"):
                    times = [measure(engine, batch, arguments.tokens, kind) for _ in range(arguments.repeats)]
                    print(f"| {batch} | {kind} | {statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f}) |")
                times = [measure_updates(engine, batch, arguments.tokens) for _ in range(arguments.repeats)]
                print(f"| {batch} | updates | {statistics.median(times):.2f} ({min(times):.2f}-{max(times):.2f}) |")
        if arguments.profile:
            with create_engine(model, arguments.batch[-1]) as engine:
                profiler = cProfile.Profile()
                profiler.runcall(measure, engine, arguments.batch[-1], arguments.tokens, "final_only")
                pstats.Stats(profiler).sort_stats("tottime").print_stats(10)


if __name__ == "__main__":
    main()
