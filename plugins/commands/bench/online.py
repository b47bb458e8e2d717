"""`bench online`: requests that come one after another through `AsyncLLMEngine`, as a server would send them."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail import AsyncLLMEngine, LLMEngine
from dovetail.commands.arrivals import check_burstiness, draw_arrivals, parse_rate, read_trace
from dovetail.commands.checks import require_at_least
from dovetail.commands.machine import Span, Watch
from dovetail.commands.progress import Progress
from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.plugins.commands.bench.corpus import read_corpus
from dovetail.plugins.commands.bench.neighbours import neighbours
from dovetail.plugins.commands.bench.result import Result, now
from dovetail.plugins.commands.bench.selection import EngineChoice, LoadChoice, Procedure
from dovetail.plugins.commands.bench.session import (
    DescribedLoad,
    check_lengths,
    create_loads,
    describe_engine,
    describe_environment,
    flat,
    greedy,
)
from dovetail.plugins.commands.bench.slo import ServiceLevels
from dovetail.plugins.commands.bench.timing import RequestTimes
from dovetail.plugins.commands.bench.traffic_metrics import Run, split_blocks, traffic_metrics
from dovetail.plugins.commands.bench.workloads import Load, trace_prompts


@dataclass(frozen=True)
class TraceChoice:
    """A trace file and what to take of it."""

    path: Path
    speed: float
    limit: int | None
    """Most requests."""
    skip_too_long: bool
    """Leave out the requests that do not fit the model, rather than refuse the trace."""
    text: Path | None
    seed: int


@dataclass(frozen=True)
class Traffic:
    """How requests come, and what counts as served well."""

    rate: float
    """Requests per second; infinite: all at once."""
    burstiness: float
    concurrency: int | None
    """Most requests in the engine at a time; others wait in front of it."""
    levels: ServiceLevels
    seed: int

    def describe(self) -> dict[str, Any]:
        """Plain data, for the workload of a result."""
        return {
            "rate": "inf" if math.isinf(self.rate) else self.rate,
            "burstiness": "inf" if math.isinf(self.burstiness) else self.burstiness,
            "concurrency": self.concurrency,
            "slo_ms": dict(self.levels.limits_ms),
        }


def parse_traffic(rate: str, burstiness: float, concurrency: int | None, slo: Sequence[str], seed: int) -> Traffic:
    """Raises `ConfigError` for what cannot be."""
    check_burstiness(burstiness)
    if concurrency is not None:
        require_at_least("--concurrency", concurrency, 1)
    return Traffic(parse_rate(rate), burstiness, concurrency, ServiceLevels.parse(slo), seed)


def run_online(
    engine_choice: EngineChoice, choice: LoadChoice | TraceChoice, traffic: Traffic, procedure: Procedure
) -> Result:
    """The load, `repeats` times, each with arrivals of its own; `warmup` of its requests run before."""
    if isinstance(choice, TraceChoice):
        # Refused before weights are read.
        read_trace(choice.path, limit=choice.limit, speed=choice.speed)
    sync_engine = LLMEngine.from_config(**engine_choice.keywords())
    environment, config = describe_environment(sync_engine), describe_engine(sync_engine)
    try:
        item = _create_load(sync_engine, choice)
    except BaseException:
        sync_engine.shutdown()
        raise
    with (
        AsyncLLMEngine(sync_engine) as engine,
        neighbours(procedure.neighbours, procedure.neighbour_threads),
        Progress(len(item.load.prompts) * procedure.repeats) as progress,
    ):
        detokenize = engine.tokenizer is not None
        runs, spans = asyncio.run(_repeat(engine, item.load, traffic, procedure, detokenize, progress))
    blocks = [block for run in runs for block in split_blocks(run)]
    arrivals = {"arrivals": "trace"} if item.load.arrivals is not None else {}
    return Result(
        kind="online",
        date=now(),
        workloads={item.load.name: {**item.description, **traffic.describe(), **arrivals}},
        procedure={"repeats": procedure.repeats, "warmup_requests": procedure.warmup, **procedure.describe()},
        metrics=traffic_metrics(item.load.name, [Run(run, _seconds(run)) for run in runs], blocks, traffic.levels),
        spans=spans,
        requests=flat(runs),
        environment=environment,
        config=config,
    )


async def _repeat(
    engine: AsyncLLMEngine, load: Load, traffic: Traffic, procedure: Procedure, detokenize: bool, progress: Progress
) -> tuple[list[list[RequestTimes]], list[Span]]:
    runs, spans = [], []
    few = Load(load.name, load.prompts[: procedure.warmup], load.output_tokens[: procedure.warmup])
    progress.show(f"{load.name}: warm-up")
    await send_load(engine, few, [0.0] * len(few.prompts), None, -1, detokenize=detokenize)
    for repetition in range(procedure.repeats):
        progress.show(f"{load.name}: run {repetition + 1}")
        await engine.reset_prefix_cache()
        gc.collect()
        arrivals = load.arrivals
        if arrivals is None:
            arrivals = draw_arrivals(len(load.prompts), traffic.rate, traffic.burstiness, traffic.seed + repetition)
        watch = Watch(load.name, repetition)
        runs.append(
            await send_load(
                engine,
                load,
                arrivals,
                traffic.concurrency,
                repetition,
                detokenize=detokenize,
                on_finish=progress.advance,
            )
        )
        spans.append(watch.stop())
    return runs, spans


async def send_load(
    engine: AsyncLLMEngine,
    load: Load,
    arrivals: Sequence[float],
    concurrency: int | None,
    repetition: int,
    *,
    detokenize: bool,
    on_finish: Callable[[], None] = lambda: None,
) -> list[RequestTimes]:
    """Sends each request at its time, whether or not earlier ones are done, and returns when all are.

    Times are those at which this client sees tokens. Raises what the first failing request raises.
    """
    places = asyncio.Semaphore(concurrency or max(1, len(load.prompts)))
    start = time.monotonic()

    async def run(index: int) -> RequestTimes:
        await asyncio.sleep(max(0.0, start + arrivals[index] - time.monotonic()))
        params = greedy(load.output_tokens[index], output_kind="delta", detokenize=detokenize)
        tokens: list[float] = []
        last = None
        async with places:
            sent = time.monotonic() - start
            async for output in engine.generate(list(load.prompts[index]), params):
                clock = time.monotonic() - start
                tokens += [clock] * sum(len(new.token_ids) for new in output.outputs)
                last = output
        if last is None or not tokens:
            raise DovetailError(f"{load.name}: request {index} brought no tokens")
        on_finish()
        scheduled = last.metrics.first_scheduled_time
        return RequestTimes(
            workload=load.name,
            repetition=repetition,
            arrival=arrivals[index],
            sent=sent,
            scheduled=None if scheduled is None else scheduled - start,
            prompt_tokens=len(load.prompts[index]),
            cached_tokens=last.num_cached_tokens,
            tokens=tokens,
        )

    return list(await asyncio.gather(*(run(index) for index in range(len(load.prompts)))))


def _seconds(run: Sequence[RequestTimes]) -> float:
    return max(request.tokens[-1] for request in run) - min(request.arrival for request in run)


def _create_load(engine: LLMEngine, choice: LoadChoice | TraceChoice) -> DescribedLoad:
    if isinstance(choice, LoadChoice):
        return create_loads(engine, choice)[0]
    requests = read_trace(choice.path, limit=choice.limit, speed=choice.speed)
    limit = engine.config.model.max_model_len
    fitting = [r for r in requests if not choice.skip_too_long or r.input_tokens + r.output_tokens <= limit]
    if not fitting:
        raise ConfigError(
            f"--trace {choice.path}: no request fits max_model_len {limit}; raise it, or take another trace"
        )
    prompts = trace_prompts(fitting, read_corpus(engine, choice.text), choice.seed)
    first = fitting[0].arrival
    load = Load(choice.path.name, prompts, [r.output_tokens for r in fitting], [r.arrival - first for r in fitting])
    if not choice.skip_too_long:
        check_lengths(load, limit)
    described = load.describe(seed=choice.seed, speed=choice.speed, skipped=len(requests) - len(fitting))
    return DescribedLoad(load, described)
