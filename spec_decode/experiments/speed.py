"""Speed ratios: paired by the prompts that ran together, over repetitions, with intervals and verdicts.

A ratio compares one group of prompts in an arm with the same group in the baseline, in the same repetition; it is
turned so that more than 1 is better. Its logarithm is averaged over repetitions, and groups are what the bootstrap
draws, since requests in flight together share whatever happens meanwhile. Values shown are geometric means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dovetail.spec_decode.experiments.bootstrap import (
    LEVEL,
    Estimate,
    Resampler,
    detectable,
    groups_needed,
    holm,
)
from dovetail.spec_decode.experiments.records import Key, RequestRecord, by_variant
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL

Verdict = Literal["faster", "slower", "undecided"]

METRICS: Mapping[str, str] = {
    "tokens/s": "output tokens of a group / seconds from its start to its last token",
    "e2e": "seconds until a request's last token, mean over the group",
    "itl": "seconds per token after the first, mean over the group's requests",
    "ttft": "seconds until a request's first token, mean over the group",
}
PRIMARY = "tokens/s"
PER_REQUEST = "tokens/s of a request"
"""Of categories: output tokens of their requests / the sum of these requests' seconds. At batch 1 it is `PRIMARY`."""


@dataclass(frozen=True)
class Decision:
    """What a ratio comes to among others."""

    adjusted_p: float | None
    verdict: Verdict
    groups_to_decide: int | None
    detectable: float | None


@dataclass(frozen=True)
class Speed:
    """One metric of one variant at one batch size, compared with the baseline."""

    metric: str
    arm: str
    length: int | None
    batch: int
    category: str | None
    """None: all."""
    baseline: float
    """Geometric mean over groups and repetitions: tokens/s, or seconds."""
    own: float
    ratio: Estimate
    """More than 1 is better; `error` is that of the logarithm."""
    adjusted_p: float | None
    """After Holm, over all variants and batch sizes of this metric but the control."""
    verdict: Verdict
    groups_to_decide: int | None
    """Groups of prompts with which a ratio like this would be decided, with 80% power; None where it is decided or
    there is nothing to decide."""
    detectable: float | None
    """The smallest speed-up that the groups at hand would decide, with 80% power: 0.03 for 3%."""

    @property
    def decision(self) -> Decision:
        """Its last four fields."""
        return Decision(self.adjusted_p, self.verdict, self.groups_to_decide, self.detectable)


def compare_speed(records: Sequence[RequestRecord], resampler: Resampler) -> list[Speed]:
    """All metrics of every variant at each batch size, and tokens per second of each category."""
    found = by_variant(records)
    results: list[Speed] = []
    for metric in METRICS:
        results += _correct([_compare(metric, key, None, found, resampler) for key in found if key[1] != BASELINE])
    categories = dict.fromkeys(record.category for record in records)
    for category in categories if len(categories) > 1 else ():
        own = [_compare(PER_REQUEST, key, category, found, resampler) for key in found if key[1] != BASELINE]
        results += _correct([speed for speed in own if not math.isnan(speed.own)])
    return results


def _compare(
    metric: str,
    key: Key,
    category: str | None,
    found: Mapping[Key, Sequence[RequestRecord]],
    resampler: Resampler,
) -> Speed:
    base = values_by_turn(found[key[0], BASELINE, None], metric, category)
    own = values_by_turn(found[key], metric, category)
    logs = log_ratios(base, own, is_rate=metric in (PRIMARY, PER_REQUEST))
    batch, arm, length = key
    if not logs:
        nan = Estimate(math.nan, None, None, 0)
        return Speed(metric, arm, length, batch, category, math.nan, math.nan, nan, None, "undecided", None, None)
    estimate = resampler.mean(list(logs.values()))
    return Speed(
        metric,
        arm,
        length,
        batch,
        category,
        geometric_mean(list(base.values())),
        geometric_mean(list(own.values())),
        exponential(estimate),
        None,
        "undecided",
        None,
        None,
    )


def log_ratios(
    base: Mapping[tuple[int, int], float], own: Mapping[tuple[int, int], float], *, is_rate: bool
) -> dict[int, float]:
    """By group, the mean over repetitions of log(own / base), turned for times so that more is better. Values are
    by (group, repetition); those that lack on either side are left out."""
    by_group: dict[int, list[float]] = {}
    for turn in base:
        if turn in own:
            ratio = math.log(own[turn] / base[turn])
            by_group.setdefault(turn[0], []).append(ratio if is_rate else -ratio)
    return {group: sum(logs) / len(logs) for group, logs in by_group.items()}


def values_by_turn(records: Sequence[RequestRecord], metric: str, category: str | None) -> dict[tuple[int, int], float]:
    """One metric's value by (group, repetition); groups that have none are left out."""
    turns: dict[tuple[int, int], list[RequestRecord]] = {}
    for record in records:
        if category is None or record.category == category:
            turns.setdefault((record.group, record.repetition), []).append(record)
    values = {turn: _VALUES[metric](own) for turn, own in turns.items()}
    return {turn: value for turn, value in values.items() if value is not None and value > 0}


def _rate(records: Sequence[RequestRecord]) -> float | None:
    return sum(len(r.token_ids) for r in records) / max(r.e2e for r in records)


def _mean_itl(records: Sequence[RequestRecord]) -> float | None:
    itls = [itl for r in records if (itl := r.itl) is not None]
    return sum(itls) / len(itls) if itls else None


_VALUES: Mapping[str, Callable[[Sequence[RequestRecord]], float | None]] = {
    PRIMARY: _rate,
    PER_REQUEST: lambda records: sum(len(r.token_ids) for r in records) / sum(r.e2e for r in records),
    "e2e": lambda records: sum(r.e2e for r in records) / len(records),
    "itl": _mean_itl,
    "ttft": lambda records: sum(r.ttft for r in records) / len(records),
}


def geometric_mean(values: Sequence[float]) -> float:
    """Of at least one positive value."""
    return math.exp(sum(map(math.log, values)) / len(values))


def exponential(estimate: Estimate) -> Estimate:
    """The estimate of a mean of logarithms as one of the geometric mean; its error stays that of the logarithm."""
    ends: tuple[float | None, float | None] = (None, None)
    if estimate.low is not None and estimate.high is not None:
        ends = (math.exp(min(estimate.low, 700.0)), math.exp(min(estimate.high, 700.0)))
    return replace(estimate, value=math.exp(estimate.value), low=ends[0], high=ends[1])


def _correct(speeds: list[Speed]) -> list[Speed]:
    """Verdicts after Holm's correction. The control is not corrected: it is there to show the noise."""
    p_values = {i: s.ratio.p for i, s in enumerate(speeds) if s.ratio.p is not None and s.arm != CONTROL}
    adjusted = holm(p_values)
    decisions = [decide(s.ratio, adjusted.get(i, s.ratio.p), max(1, len(p_values))) for i, s in enumerate(speeds)]
    return [replace(speed, **vars(decision)) for speed, decision in zip(speeds, decisions, strict=True)]


def decide(ratio: Estimate, adjusted: float | None, comparisons: int) -> Decision:
    """The verdict on a ratio (more than 1 is better; its error is that of the logarithm), as one of so many.
    `adjusted`: its p-value after correction."""
    if not ratio.has_interval or adjusted is None or ratio.error is None:
        return Decision(None, "undecided", None, None)
    decided = adjusted < 1 - LEVEL
    verdict: Verdict = "undecided" if not decided else "faster" if ratio.value > 1 else "slower"
    needed = groups_needed(math.log(ratio.value), ratio.error, ratio.groups, comparisons)
    return Decision(
        adjusted_p=adjusted,
        verdict=verdict,
        groups_to_decide=None if decided or needed is None else max(needed, ratio.groups + 1),
        detectable=math.expm1(detectable(ratio.error, comparisons)),
    )
