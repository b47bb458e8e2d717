"""Metrics of requests that come over time, through an engine in this process or over HTTP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dovetail.plugins.commands.bench.result import Metric
from dovetail.plugins.commands.bench.slo import ServiceLevels
from dovetail.plugins.commands.bench.timing import RequestTimes

Served = RequestTimes | None
"""A request's times; None for one that failed."""


@dataclass(frozen=True)
class Run:
    """Requests that shared the time, and how long they took."""

    requests: Sequence[Served]
    seconds: float
    """From the first arrival to the end of the last request."""


def traffic_metrics(
    name: str, runs: Sequence[Run], blocks: Sequence[Sequence[Served]], levels: ServiceLevels
) -> dict[str, Metric]:
    """Latencies by block of requests, rates by run. Failed requests have no latency and count as not served well."""
    served = [[r for r in block if r is not None] for block in blocks]
    found = latencies(served)
    if levels.limits_ms:
        met = [[float(r is not None and levels.are_met(r)) for r in block] for block in blocks]
        found["slo met"] = Metric("share", "higher", "mean", f"Requests with {levels.explain()}.", met)
    found |= _rates(runs, levels)
    return {f"{name}/{key}": metric for key, metric in found.items() if metric.samples}


def latencies(blocks: Sequence[Sequence[RequestTimes]]) -> dict[str, Metric]:
    """TTFT, ITL, TPOT, E2E and queueing by block of requests; those without a sample too."""
    seconds: Mapping[str, tuple[str, list[list[float]]]] = {
        "ttft": (
            "A request's arrival, the wait under the concurrency cap included, to its first token.",
            [[r.ttft for r in block] for block in blocks],
        ),
        "itl": (
            "Gaps between the arrivals of one request's tokens; 0 between those that arrive together.",
            [[gap for r in block for gap in r.gaps] for block in blocks],
        ),
        "tpot": (
            "(E2E - TTFT) / (n - 1) of a request.",
            [[r.tpot for r in block if r.tpot is not None] for block in blocks],
        ),
        "e2e": ("A request's arrival to its last token.", [[r.e2e for r in block] for block in blocks]),
        "ttft sent": (
            "From the sending of a request to its first token: without the wait under the concurrency cap.",
            [[r.tokens[0] - r.sent for r in block] for block in blocks],
        ),
        "e2e sent": (
            "From the sending of a request to its last token.",
            [[r.tokens[-1] - r.sent for r in block] for block in blocks],
        ),
        "queue": (
            "From a request's arrival to the first step that computes it.",
            [[r.queued for r in block if r.queued is not None] for block in blocks],
        ),
    }
    return {key: Metric("s", "lower", "median", text, groups) for key, (text, groups) in seconds.items()}


def _rates(runs: Sequence[Run], levels: ServiceLevels) -> dict[str, Metric]:
    served = [[r for r in run.requests if r is not None] for run in runs]
    rates = {
        "requests": ("req/s", "Requests / (end of the last one - first arrival).", [len(run) for run in served]),
        "output": ("tok/s", "Output tokens / the same time.", [sum(r.num_tokens for r in run) for run in served]),
        "input": ("tok/s", "Prompt tokens / the same time.", [sum(r.prompt_tokens for r in run) for run in served]),
    }
    if levels.limits_ms:
        good = [sum(levels.are_met(r) for r in run) for run in served]
        rates["goodput"] = ("req/s", "Requests that meet all service levels / the same time.", good)
    return {
        key: Metric(
            unit,
            "higher",
            "median",
            text,
            [[count / run.seconds] for count, run in zip(counts, runs, strict=True)],
        )
        for key, (unit, text, counts) in rates.items()
    }


class _Arriving(Protocol):
    @property
    def arrival(self) -> float: ...


_R = TypeVar("_R", bound=_Arriving)


def split_blocks(run: Sequence[_R]) -> list[list[_R]]:
    """Consecutive requests, about sqrt(n) to a block: neighbours meet the same queue, so they go together."""
    ordered = sorted(run, key=lambda request: request.arrival)
    size = math.isqrt(max(1, len(ordered)))
    return [ordered[begin : begin + size] for begin in range(0, len(ordered), size)]
