"""`bench latency` and `bench throughput`: batches through an engine in this process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

from dovetail import LLM, LLMEngine
from dovetail.commands.machine import Span, Watch
from dovetail.commands.progress import Progress
from dovetail.contracts.errors import DovetailError
from dovetail.plugins.commands.bench.neighbours import neighbours
from dovetail.plugins.commands.bench.result import Metric, Result, now
from dovetail.plugins.commands.bench.selection import EngineChoice, LoadChoice, Procedure
from dovetail.plugins.commands.bench.session import (
    DescribedLoad,
    create_loads,
    describe_engine,
    describe_environment,
    flat,
    greedy,
)
from dovetail.plugins.commands.bench.timing import RequestTimes, decode_rate, prefill_rate
from dovetail.plugins.commands.bench.workloads import Load

_PREFIX_NOTE = "emptied before each repetition; what requests of one repetition share is shared"


def run_latency(engine_choice: EngineChoice, choice: LoadChoice, procedure: Procedure) -> Result:
    """Each workload as one batch, stepped with the arrival of every token noted."""
    with LLM(**engine_choice.keywords()) as llm:
        loads = create_loads(llm.engine, choice)
        metrics: dict[str, Metric] = {}
        spans: list[Span] = []
        requests: list[RequestTimes] = []
        num_runs = len(loads) * (procedure.warmup + procedure.repeats)
        with neighbours(procedure.neighbours, procedure.neighbour_threads), Progress(num_runs) as progress:
            for item in loads:
                batches, timed = repeat(llm, item.load, procedure, progress, step_batch)
                metrics |= _latency_metrics(item.load.name, batches)
                spans += timed
                requests += flat(batches)
        return _result("latency", llm.engine, loads, procedure, metrics, spans, requests)


def run_throughput(engine_choice: EngineChoice, choice: LoadChoice, procedure: Procedure) -> Result:
    """Each workload through `LLM.generate`, as a program would call it."""
    with LLM(**engine_choice.keywords()) as llm:
        loads = create_loads(llm.engine, choice)
        metrics: dict[str, Metric] = {}
        spans: list[Span] = []
        requests: list[RequestTimes] = []
        num_runs = len(loads) * (procedure.warmup + procedure.repeats)
        with neighbours(procedure.neighbours, procedure.neighbour_threads), Progress(num_runs) as progress:
            for item in loads:
                batches, timed = repeat(llm, item.load, procedure, progress, generate_batch)
                metrics |= _throughput_metrics(item.load, batches)
                spans += timed
                requests += flat(batches)
        return _result("throughput", llm.engine, loads, procedure, metrics, spans, requests)


Batch = list[RequestTimes]


def repeat(
    llm: LLM,
    load: Load,
    procedure: Procedure,
    progress: Progress,
    run: Callable[[LLM, Load, int], Batch],
) -> tuple[list[Batch], list[Span]]:
    """The timed repetitions, each with a cold prefix cache, after warm-up ones that are dropped."""
    batches, spans = [], []
    for repetition in range(-procedure.warmup, procedure.repeats):
        progress.show(f"{load.name}: {'warm-up' if repetition < 0 else f'repetition {repetition + 1}'}")
        llm.reset_prefix_cache()
        gc.collect()
        watch = Watch(load.name, repetition)
        batch = run(llm, load, repetition)
        span = watch.stop()
        if repetition >= 0:
            batches.append(batch)
            spans.append(span)
        progress.advance()
    return batches, spans


def step_batch(llm: LLM, load: Load, repetition: int) -> Batch:
    """One batch, all requests there from the start, driven step by step."""
    engine: LLMEngine = llm.engine
    names = [f"bench-{load.name}-{repetition}-{index}" for index in range(len(load.prompts))]
    arrived: dict[str, list[float]] = {name: [] for name in names}
    finished = {}
    start = time.monotonic()
    for name, prompt, count in zip(names, load.prompts, load.output_tokens, strict=True):
        engine.add_request(name, list(prompt), greedy(count, output_kind="delta", detokenize=False))
    while engine.has_unfinished_requests():
        outputs = engine.step()
        clock = time.monotonic() - start
        for output in outputs:
            if output.error is not None:
                raise DovetailError(f"a request failed: {output.error}")
            arrived[output.request_id] += [clock] * sum(len(new.token_ids) for new in output.outputs)
            if output.finished:
                finished[output.request_id] = output.metrics
    batch = []
    for name, prompt in zip(names, load.prompts, strict=True):
        scheduled = finished[name].first_scheduled_time
        batch.append(
            RequestTimes(
                workload=load.name,
                repetition=repetition,
                arrival=0.0,
                sent=0.0,
                scheduled=None if scheduled is None else scheduled - start,
                prompt_tokens=len(prompt),
                cached_tokens=finished[name].num_cached_tokens,
                tokens=arrived[name],
            )
        )
    check_counts(load, [len(request.tokens) for request in batch])
    return batch


def generate_batch(llm: LLM, load: Load, repetition: int) -> Batch:
    """One call of `LLM.generate`. Only the first token's time and the last's are known."""
    params = [greedy(count, output_kind="final_only", detokenize=False) for count in load.output_tokens]
    start = time.monotonic()
    outputs = llm.generate([list(prompt) for prompt in load.prompts], params, use_tqdm=False)
    check_counts(load, [len(output.outputs[0].token_ids) for output in outputs])
    batch = []
    for output in outputs:
        times = output.metrics
        assert times.first_token_time is not None
        assert times.finished_time is not None
        first, last = times.first_token_time - start, times.finished_time - start
        batch.append(
            RequestTimes(
                workload=load.name,
                repetition=repetition,
                arrival=0.0,
                sent=0.0,
                scheduled=None if times.first_scheduled_time is None else times.first_scheduled_time - start,
                prompt_tokens=len(output.prompt_token_ids),
                cached_tokens=times.num_cached_tokens,
                tokens=[first] if len(output.outputs[0].token_ids) == 1 else [first, last],
            )
        )
    return batch


def check_counts(load: Load, counts: Sequence[int]) -> None:
    """Raises `DovetailError` where a request brought other than the tokens that were asked for."""
    for index, (got, wanted) in enumerate(zip(counts, load.output_tokens, strict=True)):
        if got != wanted:
            raise DovetailError(
                f"{load.name}: request {index} brought {got} tokens, not {wanted}; rates would be wrong. A plugin of"
                " the config ended it early: leave that out"
            )


def _latency_metrics(name: str, batches: Sequence[Batch]) -> dict[str, Metric]:
    found = {
        "e2e": _seconds("Start to the last token of the whole batch.", [[max(r.e2e for r in b)] for b in batches]),
        "ttft": _seconds("Start to a request's first token.", [[r.ttft for r in b] for b in batches]),
        "itl": _seconds(
            "Gaps between the arrivals of one request's tokens; 0 between those that arrive together.",
            [[gap for r in b for gap in r.gaps] for b in batches],
        ),
        "tpot": _seconds(
            "(E2E - TTFT) / (n - 1) of a request.", [[r.tpot for r in b if r.tpot is not None] for b in batches]
        ),
        "prefill": _rate(
            "tok/s",
            "Prompt tokens, cached ones too / time until the last request has its first token.",
            [[prefill_rate(b)] for b in batches],
        ),
        "decode": _rate(
            "tok/s",
            "Tokens that come once every request has its first one / the time they take.",
            [[rate] for b in batches if (rate := decode_rate(b)) is not None],
        ),
    }
    return {f"{name}/{key}": metric for key, metric in found.items() if metric.samples}


def _throughput_metrics(load: Load, batches: Sequence[Batch]) -> dict[str, Metric]:
    # All but the call itself is over when the last request finishes.
    seconds = [max(request.e2e for request in batch) for batch in batches]
    prompt, output = sum(len(tokens) for tokens in load.prompts), sum(load.output_tokens)
    found = {
        "total": _seconds("Start to the end of the last request.", [[s] for s in seconds]),
        "requests": _rate("req/s", "Requests / total time.", [[len(load.prompts) / s] for s in seconds]),
        "output": _rate("tok/s", "Output tokens / total time.", [[output / s] for s in seconds]),
        "input+output": _rate(
            "tok/s", "Prompt and output tokens / total time.", [[(prompt + output) / s] for s in seconds]
        ),
        "ttft": _seconds("Start to a request's first token.", [[r.ttft for r in b] for b in batches]),
        "prefill": _rate(
            "tok/s",
            "Prompt tokens, cached ones too / time until the last request has its first token.",
            [[prefill_rate(b)] for b in batches],
        ),
    }
    if len(load.prompts) == 1 and output > 1:
        rates = [[(output - 1) / (b[0].e2e - b[0].ttft)] for b in batches]
        found["decode"] = _rate("tok/s", "(n - 1) / (E2E - TTFT) of the request.", rates)
    return {f"{load.name}/{key}": metric for key, metric in found.items()}


def _seconds(definition: str, groups: list[list[float]]) -> Metric:
    return Metric("s", "lower", "median", definition, groups)


def _rate(unit: str, definition: str, groups: list[list[float]]) -> Metric:
    return Metric(unit, "higher", "median", definition, groups)


def _result(
    kind: str,
    engine: LLMEngine,
    loads: Sequence[DescribedLoad],
    procedure: Procedure,
    metrics: dict[str, Metric],
    spans: list[Span],
    requests: list[RequestTimes],
) -> Result:
    return Result(
        kind=kind,
        date=now(),
        workloads={item.load.name: item.description for item in loads},
        procedure={
            "repeats": procedure.repeats,
            "warmup": procedure.warmup,
            "prefix_cache": _PREFIX_NOTE,
            **procedure.describe(),
        },
        metrics=metrics,
        spans=spans,
        requests=requests,
        environment=describe_environment(engine),
        config=describe_engine(engine),
    )
