"""Compares the arms of an experiment on live traffic with the first of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dovetail.spec_decode.experiments.bootstrap import LEVEL, Estimate, Resampler, Sums
from dovetail.spec_decode.experiments.families import Ask, Decision, Judged, judge_together
from dovetail.spec_decode.experiments.live.records import LiveArm, LiveRecord, LiveTraffic
from dovetail.spec_decode.experiments.rates import affine, count_per, share
from dovetail.spec_decode.experiments.speed import PER_REQUEST

METRICS: Mapping[str, str] = {
    PER_REQUEST: "output tokens of a request / seconds until its last token",
    "e2e": "seconds until a request's last token",
    "itl": "seconds per token of a completion after the first, mean over the request",
    "ttft": "seconds until a request's first token",
}
"""Of requests that came to their end; arms are compared by geometric means."""

Value = Callable[[LiveRecord], float | None]
VALUES: Mapping[str, Value] = {
    PER_REQUEST: lambda record: record.output_tokens / record.e2e if record.e2e > 0 else None,
    "e2e": lambda record: record.e2e,
    "itl": lambda record: record.itl,
    "ttft": lambda record: record.ttft,
}
_MOST_GROUPS = 400
"""Of so many units and more, several are drawn together: intervals stay what they are, and memory small."""


@dataclass(frozen=True)
class ArmTraffic:
    """What one arm got."""

    arm: str
    drafter: str | None
    share: float
    num_units: int
    num_requests: int
    num_unfinished: int
    """Of these, aborted or failed."""
    medians: Mapping[str, float | None]
    """By metric."""
    output_tokens: float | None
    """Mean of a request that came to its end."""


@dataclass(frozen=True)
class LiveSpeed:
    """One metric of one arm, compared with the first."""

    metric: str
    arm: str
    baseline: float
    """Geometric mean over requests: tokens/s, or seconds."""
    own: float
    ratio: Estimate
    """More than 1 is better; `error` is that of the logarithm, `groups` those of both arms. The interval leaves 1 out
    if and only if the verdict is faster or slower."""
    decision: Decision
    unadjusted: Estimate
    """The same ratio with the 95% interval that it has by itself."""


@dataclass(frozen=True)
class LiveAcceptance:
    """Drafts of one arm."""

    arm: str
    drafted: int
    accepted: int
    rate: Estimate
    """Ratio of sums."""
    round_length: Estimate
    """Tokens per round, the bonus token included."""


Arms = Mapping[str, Sequence[LiveRecord]]
"""Requests by arm, the one that others are compared with first."""


def by_arm(traffic: LiveTraffic, baseline: str | None = None) -> Arms:
    """`baseline`: None is the first of the design."""
    names = [arm.name for arm in traffic.design.arms]
    if baseline is not None:
        names = [baseline, *(name for name in names if name != baseline)]
    found: dict[str, list[LiveRecord]] = {name: [] for name in names}
    for record in traffic.records:
        found[record.arm].append(record)
    return found


def describe_arm(arm: LiveArm, records: Sequence[LiveRecord]) -> ArmTraffic:
    """Counts and medians."""
    finished = [record for record in records if record.is_finished]
    medians = {}
    for metric, value_of in VALUES.items():
        values = [value for record in finished if (value := value_of(record)) is not None]
        medians[metric] = median(values) if values else None
    return ArmTraffic(
        arm=arm.name,
        drafter=arm.drafter,
        share=arm.share,
        num_units=len({record.unit for record in records}),
        num_requests=len(records),
        num_unfinished=len(records) - len(finished),
        medians=medians,
        output_tokens=sum(record.output_tokens for record in finished) / len(finished) if finished else None,
    )


def compare_speed(arms: Arms, resampler: Resampler) -> list[LiveSpeed]:
    """All metrics of all arms but the first, judged together: half of the 5% goes to tokens per second, the rest in
    equal parts to the other metrics. Left out is what one of both arms has no value of."""
    baseline, *others = arms
    asks: dict[tuple[str, str], Ask] = {}
    for metric in METRICS:
        for arm in others:
            ask = _question(metric, arms[arm], arms[baseline], resampler)
            if ask is not None:
                asks[metric, arm] = ask
    judged = judge_together(asks, {key: key[0] for key in asks}, PER_REQUEST)
    return [_live_speed(metric, arm, arms, baseline, found) for (metric, arm), found in judged.items()]


def _live_speed(metric: str, arm: str, arms: Arms, baseline: str, judged: Judged) -> LiveSpeed:
    own, base = geometric_mean(metric, arms[arm]), geometric_mean(metric, arms[baseline])
    return LiveSpeed(metric, arm, base, own, judged.ratio, judged.decision, judged.unadjusted)


def _question(metric: str, own: Sequence[LiveRecord], other: Sequence[LiveRecord], resampler: Resampler) -> Ask | None:
    sums = log_sums(metric, own), log_sums(metric, other)
    if not all(top for top, _ in sums):
        return None
    return lambda level: resampler.difference(*sums, level=level)


def log_ratio(
    metric: str, own: Sequence[LiveRecord], other: Sequence[LiveRecord], resampler: Resampler
) -> Estimate | None:
    """The logarithm of the ratio of geometric means, more than 0 is better; None where one of both has no values."""
    ask = _question(metric, own, other, resampler)
    return None if ask is None else ask(LEVEL)


def log_sums(metric: str, records: Sequence[LiveRecord]) -> Sums:
    """Sums of logarithms, turned so that more is better, and numbers of requests; by groups of units."""
    sign = 1.0 if metric == PER_REQUEST else -1.0
    return grouped(records, lambda record: _log(VALUES[metric], record, sign), lambda record: 1.0)


def _log(value_of: Value, record: LiveRecord, sign: float) -> float | None:
    value = value_of(record) if record.is_finished else None
    return sign * math.log(value) if value is not None and value > 0 else None


def geometric_mean(metric: str, records: Sequence[LiveRecord]) -> float:
    """Of at least one request with a value."""
    tops, bottoms = log_sums(metric, records)
    sign = 1.0 if metric == PER_REQUEST else -1.0
    return math.exp(sign * sum(tops) / sum(bottoms))


def grouped(records: Sequence[LiveRecord], top: Value, bottom: Callable[[LiveRecord], float]) -> Sums:
    """Sums over the requests of each unit; of many units, of several together. Requests without a `top` are left
    out."""
    units: dict[str, tuple[float, float]] = {}
    for record in records:
        value = top(record)
        if value is not None:
            above, below = units.get(record.unit, (0.0, 0.0))
            units[record.unit] = above + value, below + bottom(record)
    count = min(len(units), _MOST_GROUPS)
    tops, bottoms = [0.0] * count, [0.0] * count
    # The hash of a unit says nothing of it, so units of one group have nothing in common.
    for index, unit in enumerate(sorted(units)):
        tops[index % count] += units[unit][0]
        bottoms[index % count] += units[unit][1]
    return tops, bottoms


def describe_acceptance(arms: Arms) -> list[LiveAcceptance]:
    """Of arms in which something was drafted, all their requests."""
    found = []
    for arm, records in arms.items():
        drafting = [record for record in records if record.drafted and record.rounds]
        if drafting:
            rate = grouped(drafting, lambda record: record.accepted, lambda record: record.drafted)
            per_round = grouped(drafting, lambda record: record.accepted, lambda record: record.rounds)
            found.append(
                LiveAcceptance(
                    arm=arm,
                    drafted=sum(record.drafted for record in drafting),
                    accepted=sum(record.accepted for record in drafting),
                    rate=share(*rate),
                    round_length=affine(count_per(*per_round), 1.0, 1.0),
                )
            )
    return found
