"""How long pipeline stages wait (bubbles), by the number of cohorts that requests are divided into.

    python benchmarks/pipeline_bubbles.py [--stages 2 4 8]        share of bubbles, over a clock that is computed
    python benchmarks/pipeline_bubbles.py --wall [--stages 2]     tokens per second of worker processes, alternating

The first needs no cores: the real engine plans, and an executor that computes nothing says when each stage would be
busy. A step costs every stage a fixed time and a time per token, as measured here on steps of one worker, divided by
the number of stages. A stage begins with a step when it is done with the step before and the stage before is done
with this one. The second starts a worker process per stage, and says little where these are more than there are cores.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from host_overhead import VOCAB_SIZE, RandomTokens

from dovetail import LLM, SamplingParams
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.contracts.telemetry import StepStats, TelemetrySink
from dovetail.testing.tiny_models import save_tiny_model, tiny_config


class PipelineOptions(PluginOptions):
    """A pipeline of which only the clock is real."""

    stages: int = 2
    fixed_ms: float = 1.0
    token_ms: float = 0.1


class LateResult(Future[StepResult]):
    """Known at a time of the pipeline's clock."""

    def __init__(self, executor: Pipeline, known: float):
        super().__init__()
        self._executor = executor
        self._known = known

    def result(self, timeout: float | None = None) -> StepResult:
        """Who waits for it moves the clock."""
        self._executor.now = max(self._executor.now, self._known)
        return super().result(timeout)


class Pipeline(RandomTokens):
    """Stages that are busy for computed times."""

    Options = PipelineOptions

    def __init__(self, options: Any, spec: Any, need: Any):
        super().__init__(options, spec, replace(need, pipeline_parallel=options.stages))
        self._stages, self._fixed, self._per_token = options.stages, options.fixed_ms, options.token_ms
        self.now = 0.0
        self.free = [0.0] * options.stages
        """When each stage is done with what it was handed."""
        self.busy = 0.0
        """Of one stage; all are equal."""

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        """Hands the step to the first stage."""
        cost = (self._fixed + self._per_token * sum(plan.num_tokens)) / self._stages
        ended = self.now
        for stage in range(self._stages):
            ended = self.free[stage] = max(ended, self.free[stage]) + cost
        self.busy += cost
        future = LateResult(self, ended)
        future.set_result(super().execute(plan).result())
        return future

    @property
    def bubbles(self) -> float:
        """Share of the time in which a stage waits."""
        return 1 - self.busy / self.now


class Times(TelemetrySink):
    """Tokens and milliseconds of each step of a worker."""

    contract = (1, 0)

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []

    def on_step(self, stats: StepStats) -> None:
        """Notes a step."""
        times = stats.times
        self.steps.append(
            (stats.num_prompt_tokens + stats.num_generated_tokens, times.prepare + times.forward + times.sample)
        )


def requests(num: int, seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 16 to 400 tokens with 20 to 120 to generate."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(draw.choice([16, 60, 150, 400]))] for _ in range(num)]
    lengths = [draw.randrange(20, 120) for _ in range(num)]
    return prompts, [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]


def create(model: Path, batch: int, budget: int, executor: dict[str, Any], cohorts: int | None) -> LLM:
    """An engine; `cohorts`: their number, in place of one per stage."""
    llm = LLM(
        model={"path": str(model), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 640},
        cache={"memory_gib": 0.5, "prefix_caching": False},
        scheduler={"max_num_seqs": batch, "max_num_batched_tokens": budget},
        executor=executor,
    )
    if cohorts is not None:
        core = llm.engine.core
        assert core._cohorts is not None
        core._cohorts._num, core._cohorts._last = cohorts, cohorts - 1
        core._max_in_flight = max(core._max_in_flight, cohorts)
    return llm


def measure_costs(model: Path) -> tuple[float, float]:
    """Milliseconds of a step, and of each of its tokens, by least squares over the steps of one worker."""
    sink = Times()
    with create(model, 16, 128, {"name": "cpu", "threads": 1}, None) as llm:
        llm.generate(*requests(4), use_tqdm=False)
        llm.engine.add_telemetry_sink(sink)
        llm.generate(*requests(24, seed=1), use_tqdm=False)
    tokens, times = np.array([step[0] for step in sink.steps]), np.array([step[1] for step in sink.steps])
    matrix = np.stack([np.ones_like(tokens), tokens], axis=1)
    fixed, per_token = np.linalg.lstsq(matrix, times, rcond=None)[0]
    return max(0.0, float(fixed)), float(per_token)


def print_computed(model: Path, stages: list[int], batches: list[int]) -> None:
    """The table of bubbles over the computed clock."""
    fixed, per_token = measure_costs(model)
    print(f"one step of one worker: {fixed:.2f} ms and {1e3 * per_token:.0f} us per token\n")
    print("| stages | requests at a time | cohorts | steps | requests per step | bubbles | tokens per second |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for num_stages in stages:
        options = {"stages": num_stages, "fixed_ms": fixed, "token_ms": per_token}
        for batch in batches:
            for cohorts in sorted({1, max(1, num_stages // 2), num_stages, num_stages + 1, 2 * num_stages}):
                executor = {"name": f"{Path(__file__).resolve()}:Pipeline", **options}
                with create(model, batch, 128, executor, cohorts) as llm:
                    outputs = llm.generate(*requests(4 * batch), use_tqdm=False)
                    pipeline: Any = llm.engine.tokens._parts.executor
                    steps = llm.engine.core._step_id
                    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                    speed = 1e3 * num_tokens / pipeline.now
                    cells = (num_stages, batch, cohorts, steps, f"{num_tokens / steps:.1f}")
                    print(f"| {' | '.join(map(str, cells))} | {pipeline.bubbles:.1%} | {speed:.0f} |", flush=True)


def print_wall(model: Path, num_stages: int, repeats: int) -> None:
    """Tokens per second of real stages, one run after another."""
    counts = [1, num_stages, num_stages + 1]
    executor = {"name": "multiproc", "pipeline_parallel": num_stages, "threads": 1}
    found: dict[int, list[float]] = {count: [] for count in counts}
    engines = {count: create(model, 16, 128, executor, count) for count in counts}
    prompts, params = requests(24)
    for repeat in range(repeats + 1):
        for count, llm in engines.items():
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if repeat:  # the first is to warm up
                found[count].append(sum(p.max_tokens or 0 for p in params) / (time.perf_counter() - started))
    for llm in engines.values():
        llm.shutdown()
    print("| stages | cohorts | tokens per second (median, min-max) |\n| --- | --- | --- |")
    for count, speeds in found.items():
        print(f"| {num_stages} | {count} | {statistics.median(speeds):.0f} ({min(speeds):.0f}-{max(speeds):.0f}) |")


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--wall", action="store_true", help="start worker processes")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": VOCAB_SIZE}
        save_tiny_model(model, tiny_config("llama", max_position_embeddings=640, **sizes))
        if arguments.wall:
            for num_stages in arguments.stages:
                print_wall(model, num_stages, arguments.repeats)
        else:
            print_computed(model, arguments.stages, arguments.batch)


if __name__ == "__main__":
    main()
