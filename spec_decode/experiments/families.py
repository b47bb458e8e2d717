"""Verdicts on ratios that are shown together, and intervals that agree with them.

All ratios of a report that have a verdict are one family: with probability 95% none of those without an effect gets
one, whatever the others do. Holm's procedure with weights (`bootstrap.step_down`) sees to it, and each ratio's interval
is of the level at which the procedure tested it, so that it leaves 1 out if and only if the verdict is faster or
slower.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from dovetail.spec_decode.experiments.bootstrap import (
    LEVEL,
    Estimate,
    Resampler,
    SmallestEffect,
    Step,
    groups_needed,
    smallest_effect,
    step_down,
)

Verdict = Literal["faster", "slower", "undecided", "not judged"]
"""Not judged: what is shown with a 95% interval of its own, for orientation."""

K = TypeVar("K", bound=Hashable)

Ask = Callable[[float], Estimate]
"""The estimate of the logarithm of a ratio, more than 0 is better, with the interval of a level; its p is of 0."""

_FIRST_SHARE = 0.5
_MOST_LOG = 10.0
"""Of an effect that is reported: nothing is faster by as much as its exponential."""


@dataclass(frozen=True)
class Decision:
    """The verdict on a ratio among others."""

    adjusted_p: float | None
    verdict: Verdict
    groups_to_decide: int | None
    detectable: float | None
    """None where so few groups decide nothing."""


@dataclass(frozen=True)
class Judged:
    """A ratio of speeds, more than 1 is better, and its verdict."""

    ratio: Estimate
    """Its interval leaves 1 out if and only if the verdict is faster or slower; `error` is that of the logarithm."""
    unadjusted: Estimate
    """With the 95% interval that it has by itself."""
    decision: Decision


NOT_JUDGED = Decision(None, "not judged", None, None)


def judge_together(
    questions: Mapping[K, Ask], groups: Mapping[K, str], first: str, smallest: SmallestEffect = smallest_effect
) -> dict[K, Judged]:
    """The verdict on each ratio among all.

    Args:
        groups: which questions are alike. The group `first` has half of the 5% to begin with, the others the rest in
            equal parts; within a group questions are alike. What one does not need goes to those that are left.
        smallest: what so many groups decide, by the intervals of the questions.
    """
    alone = {key: ask(LEVEL) for key, ask in questions.items()}
    p_values = {key: found.p for key, found in alone.items() if found.p is not None}
    weights = _weights({key: groups[key] for key in p_values}, first)
    steps = step_down(p_values, weights)
    return {
        key: _judge(ask, alone[key], steps.get(key), weights.get(key, 1.0), smallest) for key, ask in questions.items()
    }


def smallest_alpha(groups: Mapping[K, str], first: str) -> float:
    """The level at which the least of these questions is tested to begin with."""
    return (1 - LEVEL) * min(_weights(groups, first).values(), default=1.0)


def first_alpha(comparisons: int) -> float:
    """The level at which one of so many ratios of the group `first` is tested to begin with."""
    return (1 - LEVEL) * _FIRST_SHARE / max(comparisons, 1)


def ask_mean(resampler: Resampler, logs: Sequence[float]) -> Ask:
    """Asks for the mean over groups, one logarithm of each."""
    return lambda level: resampler.mean(logs, level=level)


def not_judged(ask: Ask) -> Judged:
    """Of what has no verdict."""
    found = exponential(ask(LEVEL))
    return Judged(found, found, NOT_JUDGED)


def exponential(estimate: Estimate) -> Estimate:
    """The estimate of a mean of logarithms as one of the geometric mean; its error stays that of the logarithm."""
    low, high = (
        None if end is None else math.exp(end) if end < 700 else math.inf for end in (estimate.low, estimate.high)
    )
    return replace(estimate, value=math.exp(estimate.value), low=low, high=high)


def _weights(groups: Mapping[K, str], first: str) -> dict[K, float]:
    """Shares of the 5%, which sum to 1."""
    sizes = Counter(groups.values())
    others = len(sizes) - (first in sizes)
    shares = dict.fromkeys(sizes, 1.0 / max(others, 1))
    if first in sizes and others:
        shares = dict.fromkeys(sizes, (1 - _FIRST_SHARE) / others)
    if first in sizes:
        shares[first] = _FIRST_SHARE if others else 1.0
    return {key: shares[group] / sizes[group] for key, group in groups.items()}


def _judge(ask: Ask, alone: Estimate, step: Step | None, weight: float, smallest: SmallestEffect) -> Judged:
    shown = exponential(alone)
    if step is None or alone.error is None:
        return Judged(shown, shown, Decision(None, "undecided", None, None))
    found = ask(1 - step.alpha)
    # Without ends, nothing is left out at that level.
    is_decided = found.low is not None and found.high is not None and not found.low <= 0 <= found.high
    verdict: Verdict = "undecided" if not is_decided else "faster" if found.value > 0 else "slower"
    spread = alone.error * math.sqrt(alone.groups)
    needed = None if is_decided else groups_needed(alone.value, spread, step.alpha, smallest)
    effect = smallest(alone.groups, (1 - LEVEL) * weight) * spread
    decision = Decision(
        adjusted_p=step.p,
        verdict=verdict,
        groups_to_decide=None if needed is None else max(needed, alone.groups + 1),
        detectable=math.expm1(effect) if effect < _MOST_LOG else None,
    )
    return Judged(exponential(found), shown, decision)
