"""Open-loop load: how arms compare with the baseline, segment by segment, and whether the queue grows without end.

A ratio compares one segment in an arm with the same segment in the baseline, in the same repetition: the same prompts
at the same times. Logarithms are averaged over repetitions, and segments are what the bootstrap draws. Goodput is a
share of requests, so it is compared by differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from dovetail.spec_decode.experiments.bootstrap import Estimate, Resampler
from dovetail.spec_decode.experiments.families import (
    Ask,
    Judged,
    Verdict,
    ask_mean,
    judge_together,
    not_judged,
    smallest_alpha,
)
from dovetail.spec_decode.experiments.load.records import LoadKey, LoadRecord, by_load_key
from dovetail.spec_decode.experiments.rates import within
from dovetail.spec_decode.experiments.schema import CONTROL, LevelsSection
from dovetail.spec_decode.experiments.speed import PLAIN, VariantKey, geometric_mean, log_ratios, mean_known

LOAD_METRICS: Mapping[str, str] = {
    "ttft": "seconds from a request's arrival to its first token, mean over the segment",
    "itl": "seconds per token after the first, mean over the segment's requests",
    "e2e": "seconds from a request's arrival to its last token, mean over the segment",
    "tokens/s": "output tokens of a segment / seconds from its first arrival to its last token; at a load that is kept"
    " up with, this is what was asked for",
}
PRIMARY = "e2e"
_SETTLED = 0.25
"""Share of a segment within which the first requests must be through, for growth to be no start-up."""
_GROWS = 0.05
"""Share of the arriving requests that stay behind, from which the queue counts as growing."""
_STEADY = 0.1
"""Likewise: it grows by less than this for certain where the load counts as kept up with."""

Queue = Literal["keeps up", "overloaded", "not shown", "too short", "too few segments"]


@dataclass(frozen=True)
class LoadSpeed:
    """One metric of one variant at one point, compared with the baseline."""

    metric: str
    point: str
    rate: float
    arm: str
    length: int | None
    baseline: float
    """Geometric mean over segments and repetitions."""
    own: float
    ratio: Estimate
    """More than 1 is better; `error` is that of the logarithm, `groups` are segments. The interval leaves 1 out if and
    only if the verdict is faster or slower; the control's, which is not judged, is a 95% interval."""
    adjusted_p: float | None
    """After Holm, over all ratios of the load that are judged."""
    verdict: Verdict
    detectable: float | None
    """The smallest effect that as many segments would decide, with 80% power: 0.03 for 3%."""
    unadjusted: Estimate
    """The same ratio with the 95% interval that it has by itself."""


@dataclass(frozen=True)
class LoadState:
    """How one variant bore one point; the baseline too."""

    point: str
    rate: float
    arm: str
    length: int | None
    requests: int
    queued: float
    """Mean seconds from arrival until a request was first scheduled."""
    ttft_p90: float
    e2e_p90: float
    growth: Estimate
    """Requests that stay behind, as a share of those that arrive."""
    queue: Queue
    capacity: float | None
    """Where it is overloaded: about how many requests per second it serves."""
    enough_requests: int | None
    """Where segments are too short: about how many requests of each would tell."""
    goodput: float | None
    """Share of requests within the service levels; None without any."""
    goodput_gain: Estimate | None
    """The share less the baseline's, paired by segments."""


@dataclass(frozen=True)
class MissingLoad:
    """A variant that was to run at a point, and of which no segment was measured there."""

    point: str
    rate: float
    arm: str
    length: int | None


@dataclass(frozen=True)
class LoadReport:
    """All that is said about a load."""

    slo_ms: Mapping[str, float]
    baseline: VariantKey
    """What others are compared with; the control is compared with plain."""
    speed: Sequence[LoadSpeed]
    states: Sequence[LoadState]
    requests: Sequence[LoadRecord]
    planned: int
    """Segments of all arms and repetitions."""
    measured: int
    missing: Sequence[MissingLoad] = ()


def describe_load(
    records: Sequence[LoadRecord],
    levels: LevelsSection,
    resampler: Resampler,
    planned: int,
    baseline: VariantKey = PLAIN,
    rates: Mapping[LoadKey, float] = MappingProxyType({}),
) -> LoadReport:
    """Compares every variant with the baseline (the control with plain) at every point. All ratios of the load but the
    control's are one family: half of its 5% goes to `PRIMARY`, the rest in equal parts to the other metrics.

    Args:
        planned: segments of all arms and repetitions.
        rates: requests per second of every variant and point that was to be measured.
    """
    found = by_load_key(records)
    limits = {name: value for name, value in levels.model_dump().items() if value is not None}
    pairs = {key: (key[0], *(PLAIN if key[1] == CONTROL else baseline)) for key in found}
    return LoadReport(
        limits,
        baseline,
        _speeds({key: against for key, against in pairs.items() if key != against}, found, resampler),
        [_state(key, pairs[key], found, limits, resampler) for key in found],
        records,
        planned,
        len({(r.point, r.arm, r.length, r.repetition, r.segment) for r in records}),
        [MissingLoad(key[0], rate, *key[1:]) for key, rate in rates.items() if key not in found],
    )


_Turns = dict[tuple[int, int], list[LoadRecord]]
"""Records by (segment, repetition)."""


def _by_turn(records: Sequence[LoadRecord]) -> _Turns:
    turns: _Turns = {}
    for record in records:
        turns.setdefault((record.segment, record.repetition), []).append(record)
    return turns


_VALUES: Mapping[str, Callable[[Sequence[LoadRecord]], float | None]] = {
    "ttft": lambda records: statistics.mean(r.ttft for r in records),
    "itl": lambda records: mean_known(r.itl for r in records),
    "e2e": lambda records: statistics.mean(r.e2e for r in records),
    "tokens/s": lambda records: sum(r.tokens for r in records) / max(r.finished for r in records),
}


def _values(records: Sequence[LoadRecord], metric: str) -> dict[tuple[int, int], float]:
    values = {turn: _VALUES[metric](own) for turn, own in _by_turn(records).items()}
    return {turn: value for turn, value in values.items() if value is not None and value > 0}


_Question = tuple[str, LoadKey]


def _speeds(
    pairs: Mapping[LoadKey, LoadKey], found: Mapping[LoadKey, Sequence[LoadRecord]], resampler: Resampler
) -> list[LoadSpeed]:
    logs: dict[_Question, tuple[float, ...]] = {}
    for metric in LOAD_METRICS:
        for key, against in pairs.items():
            sides = (_values(found.get(one, ()), metric) for one in (against, key))
            logs[metric, key] = tuple(log_ratios(*sides, is_rate=metric == "tokens/s").values())
    groups = {question: question[0] for question, own in logs.items() if own and question[1][1] != CONTROL}
    finest = resampler.finest(smallest_alpha(groups, PRIMARY))
    asks: dict[_Question, Ask] = {question: ask_mean(finest, logs[question]) for question in groups}
    judged = judge_together(asks, groups, PRIMARY)
    judged |= {q: not_judged(ask_mean(resampler, own)) for q, own in logs.items() if own and q not in groups}
    return [
        _speed(metric, key, against, found, judged[metric, key])
        for metric in LOAD_METRICS
        for key, against in pairs.items()
        if (metric, key) in judged
    ]


def _speed(
    metric: str, key: LoadKey, against: LoadKey, found: Mapping[LoadKey, Sequence[LoadRecord]], judged: Judged
) -> LoadSpeed:
    point, arm, length = key
    base, own = (geometric_mean(list(_values(found[one], metric).values())) for one in (against, key))
    decision = judged.decision
    return LoadSpeed(
        metric,
        point,
        found[key][0].rate,
        arm,
        length,
        base,
        own,
        judged.ratio,
        adjusted_p=decision.adjusted_p,
        verdict=decision.verdict,
        detectable=decision.detectable,
        unadjusted=judged.unadjusted,
    )


def _state(
    key: LoadKey,
    against: LoadKey,
    found: Mapping[LoadKey, Sequence[LoadRecord]],
    limits: Mapping[str, float],
    resampler: Resampler,
) -> LoadState:
    point, arm, length = key
    own = found[key]
    growth = queue_growth(own, resampler)
    queue = judge_queue(own, growth)
    rate = own[0].rate
    gain = None
    if limits and key != against and against in found:
        gain = _goodput_gain(own, found[against], limits, resampler)
    return LoadState(
        point,
        rate,
        arm,
        length,
        len(own),
        queued=statistics.mean(r.queued for r in own),
        ttft_p90=float(np.quantile([r.ttft for r in own], 0.9)),
        e2e_p90=float(np.quantile([r.e2e for r in own], 0.9)),
        growth=growth,
        queue=queue,
        capacity=rate * (1 - growth.value) if queue == "overloaded" else None,
        enough_requests=math.ceil(rate * _first_e2e(own) / _SETTLED) if queue == "too short" else None,
        goodput=_share_met(own, limits) if limits else None,
        goodput_gain=gain,
    )


def queue_growth(records: Sequence[LoadRecord], resampler: Resampler) -> Estimate:
    """Of each request that arrives, the share that adds to those under way for good: from the second quarter of the
    segments' arrivals to the last, over segments."""
    by_segment: dict[int, list[float]] = {}
    for (segment, _), own in _by_turn(records).items():
        by_segment.setdefault(segment, []).append(_growth(own))
    return resampler.mean([statistics.mean(values) for values in by_segment.values()])


def _growth(records: Sequence[LoadRecord]) -> float:
    own = sorted(records, key=lambda record: record.arrival)
    under_way = [sum(other.finished > one.arrival for other in own[:i]) for i, one in enumerate(own)]
    quarter = len(own) // 4
    before, after = under_way[quarter : 2 * quarter], under_way[-quarter:]
    arrived = (len(own) - 1 - (quarter - 1) / 2) - (quarter + (quarter - 1) / 2)
    return (statistics.mean(after) - statistics.mean(before)) / arrived


def judge_queue(records: Sequence[LoadRecord], growth: Estimate) -> Queue:
    """Whether a variant serves what arrives."""
    if growth.low is None or growth.high is None:
        return "too few segments"
    lasts = statistics.median(max(r.arrival for r in own) for own in _by_turn(records).values())
    if growth.high < _STEADY:
        return "keeps up"
    if _first_e2e(records) > _SETTLED * lasts:
        return "too short"
    return "overloaded" if growth.low > 0 and growth.value >= _GROWS else "not shown"


def _first_e2e(records: Sequence[LoadRecord]) -> float:
    """Of the requests that an idle engine gets."""
    return statistics.median(min(own, key=lambda r: r.arrival).e2e for own in _by_turn(records).values())


def _is_met(record: LoadRecord, limits: Mapping[str, float]) -> bool:
    values = {"ttft": record.ttft, "itl": record.itl or 0.0, "e2e": record.e2e}
    return all(1e3 * values[name] <= limit for name, limit in limits.items())


def _share_met(records: Sequence[LoadRecord], limits: Mapping[str, float]) -> float:
    return statistics.mean(_is_met(record, limits) for record in records)


def _goodput_gain(
    own: Sequence[LoadRecord], base: Sequence[LoadRecord], limits: Mapping[str, float], resampler: Resampler
) -> Estimate:
    """Ends within what can be; without an interval where segments do not differ, since a few that are alike show no
    certainty that all are."""
    pair = _by_turn(own), _by_turn(base)
    by_segment: dict[int, list[float]] = {}
    for turn in pair[0]:
        if turn in pair[1]:
            difference = _share_met(pair[0][turn], limits) - _share_met(pair[1][turn], limits)
            by_segment.setdefault(turn[0], []).append(difference)
    found = within(resampler.mean([statistics.mean(values) for values in by_segment.values()]), -1.0, 1.0)
    return replace(found, low=None, high=None) if found.low == found.high else found
