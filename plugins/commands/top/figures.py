"""What happened between two readings of a server's metrics."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dovetail.plugins.commands.top.scrape import NOTHING, Labels, Snapshot

_LATENCIES = {
    "ttft": ("vllm:time_to_first_token_seconds",),
    "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "e2e": ("vllm:e2e_request_latency_seconds",),
    "queue": ("vllm:request_queue_time_seconds",),
}
"""Histograms by what they are called here; the newer name first."""
_REASON = "dovetail:replica_down_reason"


@dataclass(frozen=True)
class Quantiles:
    """Of one histogram, in seconds."""

    p50: float
    p99: float
    count: int


@dataclass(frozen=True)
class Acceptance:
    """Of one drafter's drafts."""

    rate: float
    """Accepted / verified draft tokens."""
    length: float | None
    """Tokens per round, the bonus token included; None where rounds are not counted."""


@dataclass(frozen=True)
class EngineLoad:
    """What one engine of several has now."""

    running: int
    waiting: int
    kv_usage: float | None
    """0 to 1."""
    trouble: str = ""
    """Why it takes no requests; empty: it does. Its numbers are those that it still reports, or 0."""


@dataclass(frozen=True)
class Load:
    """What holds now."""

    running: int
    waiting: int
    kv_usage: float | None
    """0 to 1, the mean of the engines."""
    sinks_off: tuple[str, ...]
    """Telemetry sinks that raised."""
    engines: Mapping[str, EngineLoad] = field(default_factory=dict)
    """By the label `engine`, where there are several: replicas, those too that are down."""


@dataclass(frozen=True)
class Figures:
    """What happened in some time. Rates are per second; None where nothing tells them."""

    seconds: float | None
    """None: since the server's start."""
    prompt_tokens: float
    generation_tokens: float
    prefix_hit_rate: float | None
    preemptions: float
    ended: Mapping[str, float]
    """Requests by finish reason; those that there were."""
    latencies: Mapping[str, Quantiles]
    """"ttft", "itl", "e2e" and "queue", as far as something was observed."""
    acceptance: Mapping[str, Acceptance]
    """By drafter; "" where the server tells of none."""

    def per_second(self, count: float) -> float | None:
        """A rate."""
        return count / self.seconds if self.seconds else None


def load_of(now: Snapshot) -> Load:
    """What holds at a reading."""
    usages = now.of("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc").values()
    sinks = now.of("dovetail:telemetry_sink_on")
    return Load(
        running=int(sum(now.of("vllm:num_requests_running").values())),
        waiting=int(sum(now.of("vllm:num_requests_waiting").values())),
        kv_usage=sum(usages) / len(usages) if usages else None,
        sinks_off=tuple(sorted(dict(labels).get("sink", "") for labels, is_on in sinks.items() if not is_on)),
        engines=_engines(now),
    )


def _engines(now: Snapshot) -> dict[str, EngineLoad]:
    running = _by_engine(now, "vllm:num_requests_running")
    up = _by_engine(now, "dovetail:replica_up")
    reasons = {dict(labels).get("engine", ""): dict(labels).get("reason", "") for labels in now.of(_REASON)}
    if len({*running, *up}) < 2:
        return {}
    waiting = _by_engine(now, "vllm:num_requests_waiting")
    usages = _by_engine(now, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    # "10" comes behind "9".
    return {
        engine: EngineLoad(
            int(running.get(engine, 0)),
            int(waiting.get(engine, 0)),
            usages.get(engine),
            "" if up.get(engine, 1) else reasons.get(engine, "it takes no requests"),
        )
        for engine in sorted({*running, *up}, key=lambda name: (len(name), name))
    }


def _by_engine(now: Snapshot, *names: str) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for labels, value in now.of(*names).items():
        found[dict(labels).get("engine", "")] += value
    return dict(found)


def figures_between(before: Snapshot, after: Snapshot) -> Figures:
    """What happened between two readings; with `NOTHING` before, since the server's start."""
    change = _Change(before, after)
    queries = change.total("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
    hits = change.total("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
    quantiles = {name: change.quantiles(*histograms) for name, histograms in _LATENCIES.items()}
    return Figures(
        seconds=None if before is NOTHING else after.time - before.time,
        prompt_tokens=change.total("vllm:prompt_tokens_total"),
        generation_tokens=change.total("vllm:generation_tokens_total"),
        prefix_hit_rate=hits / queries if queries else None,
        preemptions=change.total("vllm:num_preemptions_total"),
        ended={reason: count for reason, count in change.by("finished_reason", "vllm:request_success_total") if count},
        latencies={name: found for name, found in quantiles.items() if found is not None},
        acceptance=_acceptance(change),
    )


def _acceptance(change: _Change) -> dict[str, Acceptance]:
    accepted = dict(change.by("drafter", "vllm:spec_decode_num_accepted_tokens_total"))
    rounds = dict(change.by("drafter", "vllm:spec_decode_num_drafts_total"))
    found = {}
    for drafter, drafted in change.by("drafter", "vllm:spec_decode_num_draft_tokens_total"):
        if drafted:
            kept, num_rounds = accepted.get(drafter, 0.0), rounds.get(drafter, 0.0)
            found[drafter] = Acceptance(kept / drafted, 1 + kept / num_rounds if num_rounds else None)
    return found


class _Change:
    """How much counters rose between two readings. One that fell was started anew, with its server."""

    def __init__(self, before: Snapshot, after: Snapshot):
        self._before = before
        self._after = after

    def rises(self, *names: str) -> dict[Labels, float]:
        """By labels."""
        before = self._before.of(*names)
        return {
            labels: value - before.get(labels, 0.0) if value >= before.get(labels, 0.0) else value
            for labels, value in self._after.of(*names).items()
        }

    def total(self, *names: str) -> float:
        """Over all labels."""
        return sum(self.rises(*names).values())

    def by(self, label: str, *names: str) -> list[tuple[str, float]]:
        """By one label's value, sorted."""
        sums: defaultdict[str, float] = defaultdict(float)
        for labels, value in self.rises(*names).items():
            sums[dict(labels).get(label, "")] += value
        return sorted(sums.items())

    def quantiles(self, *names: str) -> Quantiles | None:
        """None where nothing was observed."""
        buckets = self.by("le", *(f"{name}_bucket" for name in names))
        cumulative = sorted((float(bound), count) for bound, count in buckets)
        if not cumulative or not cumulative[-1][1]:
            return None
        return Quantiles(quantile(0.5, cumulative), quantile(0.99, cumulative), int(cumulative[-1][1]))


def quantile(share: float, buckets: Iterable[tuple[float, float]]) -> float:
    """As Prometheus' histogram_quantile: linear between the bounds of the bucket in which it lies; of the last bucket,
    which has no upper bound, the lower one. `buckets`: (upper bound, observations up to it), by bound, the last bound
    infinite and at least one observation."""
    buckets = list(buckets)
    rank = share * buckets[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            share_of_bucket = (rank - below) / (count - below)
            return lower if math.isinf(bound) else min(bound, lower + (bound - lower) * share_of_bucket)
        lower, below = bound, count
    return lower
