"""Intervals of rates that have bounds: shares (0 to 1) and counts per step (0 and more), over prompts as clusters.

A rate is a ratio of sums: of accepted drafts to drafted tokens, say. The interval is symmetric in the logit of a share
or the logarithm of a count, so neither end is beyond what can be. Its standard error there is the larger of two: the
delete-one jackknife's (Efron and Stein 1981), which sees prompts that few others are like, and the linearisation's
(Cochran 1977, section 2.11). Half an event in one trial more (Haldane 1956; Anscombe 1956) gives a rate of 0 or 1 an
error too. The quantile is Student's t, with one degree of freedom less than there are clusters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dovetail.commands.student import t_quantile
from dovetail.spec_decode.experiments.bootstrap import MIN_GROUPS, Array, Estimate


@dataclass(frozen=True)
class _Scale:
    """Where an interval is symmetric."""

    to: Callable[[Array], Array]
    back: Callable[[float], float]
    slope: Callable[[float], float]
    """Of `to`."""
    added_trials: float


_LOGIT = _Scale(
    to=lambda rate: np.log(rate) - np.log1p(-rate),
    back=lambda value: 1 / (1 + math.exp(-value)),
    slope=lambda rate: 1 / (rate * (1 - rate)),
    added_trials=1.0,
)
_LOGARITHM = _Scale(to=np.log, back=math.exp, slope=lambda rate: 1 / rate, added_trials=0.0)
_ADDED_EVENTS = 0.5


def share(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """sum(parts) / sum(wholes), one of each per cluster, no part more than its whole: 0 to 1, as is the interval.

    There is none with fewer than `MIN_GROUPS` clusters that have a whole. Raises `ValueError` where none has, and for
    parts below 0 or above their wholes.
    """
    if any(part > whole for part, whole in zip(parts, wholes, strict=True)):
        raise ValueError("a part is more than its whole")
    return _rate(parts, wholes, _LOGIT)


def count_per(events: Sequence[float], steps: Sequence[float]) -> Estimate:
    """sum(events) / sum(steps), one of each per cluster: 0 or more, as is the interval. Otherwise as `share`."""
    return _rate(events, steps, _LOGARITHM)


def mean_share(shares: Sequence[float], trials: float) -> Estimate:
    """The mean of shares (0 to 1), one per cluster, that count alike. `trials`: in how many all together were seen, by
    which a mean of 0 or 1 is uncertain."""
    each = trials / len(shares)
    return share([each * value for value in shares], [each] * len(shares))


def affine(estimate: Estimate, factor: float, offset: float) -> Estimate:
    """factor x estimate + offset, for a factor above 0."""
    low, high = (None if end is None else factor * end + offset for end in (estimate.low, estimate.high))
    return Estimate(factor * estimate.value + offset, low, high, estimate.groups)


def within(estimate: Estimate, low: float, high: float) -> Estimate:
    """The estimate, whose interval ends at what can be; one that spans all of that says nothing, and is left out."""
    if estimate.low is None or estimate.high is None:
        return estimate
    if estimate.low <= low and estimate.high >= high:
        return replace(estimate, low=None, high=None)
    return replace(estimate, low=max(low, estimate.low), high=min(high, estimate.high))


def _rate(parts: Sequence[float], wholes: Sequence[float], scale: _Scale) -> Estimate:
    pairs = [(part, whole) for part, whole in zip(parts, wholes, strict=True) if whole]
    if not pairs:
        raise ValueError("the wholes sum to 0")
    top, bottom = np.asarray(pairs, float).T
    if top.min() < 0 or bottom.min() < 0:
        raise ValueError("a part or a whole is below 0")
    value, count = float(top.sum() / bottom.sum()), len(pairs)
    if count < MIN_GROUPS:
        return Estimate(value, None, None, count)
    centre = (top.sum() + _ADDED_EVENTS) / (bottom.sum() + scale.added_trials)
    reach = t_quantile(count - 1) * max(_jackknife(top, bottom, scale), _linear(top, bottom, float(centre), scale))
    middle = float(scale.to(centre))
    # Adding half an event moves the middle: the interval holds the rate as it was found too.
    return Estimate(value, min(value, scale.back(middle - reach)), max(value, scale.back(middle + reach)), count)


def _jackknife(top: Array, bottom: Array, scale: _Scale) -> float:
    without = (top.sum() - top + _ADDED_EVENTS) / (bottom.sum() - bottom + scale.added_trials)
    moved = scale.to(without)
    count = len(top)
    return math.sqrt((count - 1) / count * float(((moved - moved.mean()) ** 2).sum()))


def _linear(top: Array, bottom: Array, centre: float, scale: _Scale) -> float:
    total, count = bottom.sum(), len(top)
    rest = top - top.sum() / total * bottom
    error = math.sqrt(count / (count - 1) * float((rest**2).sum())) / total
    return max(error, _ADDED_EVENTS / (total + scale.added_trials)) * scale.slope(centre)
