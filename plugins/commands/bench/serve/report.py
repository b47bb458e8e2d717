"""The result of `bench serve`: metrics by server, what failed, how tokens were counted, and servers side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from dovetail.commands.http import without_password
from dovetail.commands.machine import describe_machine
from dovetail.plugins.commands.bench.compare import compare_metric
from dovetail.plugins.commands.bench.comparison import Comparison, Row
from dovetail.plugins.commands.bench.result import FailedRequests, Metric, Result, now
from dovetail.plugins.commands.bench.serve.client import Reply, Target
from dovetail.plugins.commands.bench.serve.session import Measured, Plan, Turn
from dovetail.plugins.commands.bench.slo import ServiceLevels
from dovetail.plugins.commands.bench.stats import MANY_GROUPS, MIN_GROUPS, paired_ratio_of
from dovetail.plugins.commands.bench.traffic_metrics import Run, Served, latencies, split_blocks, traffic_metrics

_COMPARED: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("ttft", "ttft sent", "tpot", "itl", "e2e", "e2e sent"), ("mean", "median", "p90", "p99")),
    **dict.fromkeys(("requests", "output", "goodput"), ("mean",)),
    "slo met": ("mean",),
}
"""Statistics of each metric that servers are compared by."""


def create_result(
    plan: Plan, measured: Measured, levels: ServiceLevels, described: Mapping[str, Any], notes: Sequence[str]
) -> Result:
    """The result of a measurement. `described`: of the data set. `notes`: warnings from before."""
    by_target = {target.label: _turns_of(measured, target) for target in plan.targets}
    metrics: dict[str, Metric] = {}
    for target in plan.targets:
        metrics |= _metrics(plan.workload(target), by_target[target.label], levels)
    traffic = plan.traffic.describe()
    if any(ask.arrival is not None for ask in plan.asks):
        traffic |= {"rate": "trace"}
    workload = {**described, **traffic, "goodput_ms": dict(levels.limits_ms), "endpoint": plan.form.endpoint}
    first, *others = plan.targets
    warning = measured.client.warning()
    return Result(
        kind="serve",
        date=now(),
        workloads={plan.workload(target): workload for target in plan.targets},
        procedure={
            "servers": len(plan.targets),
            "turns": len(by_target[first.label]),
            "requests_per_turn": plan.turn_size,
            "warmup_requests": len(plan.warmups),
        },
        metrics=metrics,
        requests=[reply.times for turn in measured.turns for reply in turn.replies if reply.times is not None],
        failures={plan.workload(target): count_failures(by_target[target.label]) for target in plan.targets},
        client={**measured.client.describe(), "tokens_counted_by": _counted_by(by_target)},
        comparisons=[_compare(plan, first, other, by_target, metrics) for other in others],
        warnings=[*notes, *([warning] if warning else []), *_lines(plan, by_target)],
        environment=describe_machine(),
        config={
            "servers": [
                {"label": t.label, "base_url": without_password(t.base_url), "model": t.model} for t in plan.targets
            ],
            "fields": dict(plan.form.fields),
            "usage_asked": dict(measured.usage_asked),
        },
    )


def count_failures(turns: Sequence[Turn]) -> list[FailedRequests]:
    """The requests that failed, by kind, the most frequent first."""
    messages: dict[str, Counter[str]] = {}
    for failure in (reply.failure for turn in turns for reply in turn.replies):
        if failure is not None:
            messages.setdefault(failure.kind, Counter())[failure.message] += 1
    found = [FailedRequests(kind, told.total(), told.most_common(1)[0][0]) for kind, told in messages.items()]
    return sorted(found, key=lambda failed: failed.count, reverse=True)


def write_requests(path: Path, measured: Measured) -> None:
    """One JSON line per request, failed ones too."""
    with path.open("wb") as file:
        for turn in measured.turns:
            for reply in turn.replies:
                file.write(orjson.dumps(_line(turn, reply)) + b"\n")


def _turns_of(measured: Measured, target: Target) -> list[Turn]:
    return [turn for turn in measured.turns if turn.target == target]


def _metrics(workload: str, turns: Sequence[Turn], levels: ServiceLevels) -> dict[str, Metric]:
    runs = [Run([reply.times for reply in turn.replies], turn.seconds) for turn in turns]
    if len(runs) > 1:
        # What a turn's requests met, they met together.
        return traffic_metrics(workload, runs, [run.requests for run in runs], levels)
    blocks: list[list[Served]] = [
        [reply.times for reply in block] for turn in turns for block in split_blocks(turn.replies)
    ]
    return traffic_metrics(workload, runs, blocks, levels)


def _compare(
    plan: Plan, a: Target, b: Target, turns: Mapping[str, Sequence[Turn]], metrics: Mapping[str, Metric]
) -> Comparison:
    """b with a: latencies of the prompts that both served, rates of all."""
    pairs = list(zip(turns[a.label], turns[b.label], strict=True))
    both = [_both(x, y) for x, y in pairs]
    rows = list(_rows(plan, (a, b), _paired(pairs, both), metrics))
    count, num = sum(map(len, both)), len(plan.asks)
    equal = sum(x.replies[i].text == y.replies[i].text for (x, y), kept in zip(pairs, both, strict=True) for i in kept)
    notes = [
        f"Latencies are of the {count} of {num} prompts that both served; rates and service levels of all.",
        f"The text was the same for {equal} of {count} prompts.",
        f"Intervals: of {len(pairs)} turns, each the same prompts at the same times on one server after the other;"
        " Student's t on the logarithms of the turns' ratios,"
        f" from {MANY_GROUPS} turns on a bootstrap that draws turns, none below {MIN_GROUPS}. undecided: the interval"
        " holds 1, or there is none.",
    ]
    warnings = [f"{num - count} of {num} prompts failed on one server or both"] if count < num else []
    return Comparison(a.label, b.label, rows, notes, warnings)


def _paired(pairs: Sequence[tuple[Turn, Turn]], both: Sequence[Sequence[int]]) -> list[dict[str, Metric]]:
    """Latencies of each side, by turn, of the prompts that both served."""
    return [
        latencies(
            [
                [times for i in kept if (times := pair[side].replies[i].times) is not None]
                for pair, kept in zip(pairs, both, strict=True)
            ]
        )
        for side in (0, 1)
    ]


def _rows(
    plan: Plan, servers: tuple[Target, Target], paired: Sequence[Mapping[str, Metric]], every: Mapping[str, Metric]
) -> Iterator[Row]:
    for name, statistics in _COMPARED.items():
        if name in paired[0]:
            a, b = (side[name] for side in paired)
        else:
            keys = [f"{plan.workload(target)}/{name}" for target in servers]
            if not all(key in every for key in keys):
                continue
            a, b = (every[key] for key in keys)
        if a.samples and b.samples:
            yield from (row for statistic in statistics if (row := _row(name, a, b, statistic)) is not None)


def _row(name: str, a: Metric, b: Metric, statistic: str) -> Row | None:
    # A percentile beyond which no sample is expected is none.
    if statistic.startswith("p") and min(len(a.samples), len(b.samples)) * (100 - float(statistic[1:])) < 100:
        return None
    return compare_metric(name, a, b, statistic, paired_ratio_of)


def _both(a: Turn, b: Turn) -> list[int]:
    """Positions in the turn of the prompts that both served."""
    return [i for i, (x, y) in enumerate(zip(a.replies, b.replies, strict=True)) if x.times and y.times]


def _counted_by(turns: Mapping[str, Sequence[Turn]]) -> dict[str, dict[str, int]]:
    """By server: how many replies were counted in which way."""
    return {
        label: dict(Counter(r.counted_by for turn in own for r in turn.replies if r.counted_by is not None))
        for label, own in turns.items()
    }


def _lines(plan: Plan, turns: Mapping[str, Sequence[Turn]]) -> Iterator[str]:
    for target in plan.targets:
        replies = [reply for turn in turns[target.label] for reply in turn.replies]
        if any(reply.counted_by == "chunks" for reply in replies):
            yield (
                f"{target.label} says no usage: its output tokens are counted as chunks of the stream, which may hold"
                " several"
            )
        served = [r for r in replies if r.times is not None]
        if short := sum(r.times is not None and r.times.num_tokens < r.asked_tokens for r in served):
            yield (
                f"{target.label}: {short} of {len(served)} replies have fewer tokens than were asked for; --ignore-eos"
                " asks for all where the server knows it"
            )


def _line(turn: Turn, reply: Reply) -> dict[str, Any]:
    times = reply.times
    return {
        "server": turn.target.label,
        "turn": turn.number,
        "index": reply.index,
        "arrival_s": reply.arrival,
        "sent_s": reply.sent,
        "ended_s": reply.ended,
        "error": None if reply.failure is None else {"kind": reply.failure.kind, "message": reply.failure.message},
        "prompt_tokens": times and times.prompt_tokens,
        "cached_tokens": times and times.cached_tokens,
        "asked_tokens": reply.asked_tokens,
        "output_tokens": times and times.num_tokens,
        "counted_by": reply.counted_by,
        "ttft_s": times and times.ttft,
        "tpot_s": times and times.tpot,
        "e2e_s": times and times.e2e,
        "itl_s": times and [later - earlier for earlier, later in pairwise(times.tokens)],
        "finish_reason": reply.finish_reason,
        "text": reply.text,
    }
