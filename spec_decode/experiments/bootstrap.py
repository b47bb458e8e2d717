"""Intervals, p-values and sample sizes for means and ratios of sums over independent groups.

The method is the **symmetric bootstrap-t** (Hall 1988, "On symmetric bootstrap confidence intervals"; Hall 1992,
section 3.6): groups are drawn with replacement, each draw's deviation is divided by that draw's own standard error, and
the 95% quantile of the absolute values takes the place of Student's t. A ratio's standard error is that of its
linearisation (Cochran 1977, section 2.11). Speed ratios are means of log ratios, so the interval is of the geometric
mean of the groups' ratios.

Why this one: coverage of 95% intervals over 4,000 simulated experiments each, in percent.

    groups  noise            percentile  Student's t  equal-tailed bootstrap-t  this one
      8     normal              88          95                95                  96
     12     normal              90          95                94                  95
     12     exponential         87          90                94                  93
     12     lognormal(0.5)      89          92                94                  94
     24     exponential         92          93                95                  95
     24     t with 3 d.o.f.     93          96                93                  97
     48     lognormal(0.5)      93          94                94                  94
     48     5% spikes           93          96                92                  97

The percentile bootstrap is too narrow for the few groups that experiments have, Student's t for skewed speed-ups (a few
prompts that gain much), the equal-tailed form for spikes. This one errs to the wide side under heavy tails, where it
errs; with 8 to 12 groups and exponential noise it covers 92 to 93%.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEVEL = 0.95
MIN_GROUPS = 5
"""With fewer independent groups there is no interval: their spread is not known."""
_DRAWS = 10_000
_CHUNK = 250_000
"""Weights drawn at a time, to bound memory."""
_LEAST_ERROR = 1e-3
"""A draw's standard error counts as at least this share of the sample's: draws of one group many times have none."""
_POWER = 0.8


@dataclass(frozen=True)
class Estimate:
    """A value with its interval."""

    value: float
    low: float | None
    """95%; None with fewer than `MIN_GROUPS` groups."""
    high: float | None
    groups: int
    error: float | None = None
    """Standard error."""
    p: float | None = None
    """Two-sided, of the null hypothesis that was asked about."""

    @property
    def has_interval(self) -> bool:
        """Whether there were groups enough."""
        return self.low is not None


class Resampler:
    """Draws of groups, made once per number of groups and used for everything that is computed from so many."""

    def __init__(self, seed: int, draws: int = _DRAWS):
        self._seed = seed
        self._draws = draws
        self._weights: dict[int, Array] = {}

    def weights(self, groups: int) -> Array:
        """How often each draw holds each group: [groups, draws]."""
        if groups not in self._weights:
            generator = np.random.default_rng([self._seed, groups])
            rows = max(1, _CHUNK // groups)
            parts = []
            for start in range(0, self._draws, rows):
                count = min(rows, self._draws - start)
                picks = generator.integers(0, groups, (count, groups)) + groups * np.arange(count)[:, None]
                parts.append(np.bincount(picks.ravel(), minlength=count * groups).reshape(count, groups))
            self._weights[groups] = np.concatenate(parts).T.astype(np.float64)
        return self._weights[groups]

    def mean(self, values: Sequence[float], null: float = 0.0) -> Estimate:
        """The mean over groups; `p` is that of the mean being `null`."""
        return self.ratio(values, [1.0] * len(values), null)

    def ratio(self, numerators: Sequence[float], denominators: Sequence[float], null: float = 0.0) -> Estimate:
        """sum(numerators) / sum(denominators), one of each per group. Raises `ValueError` where the latter is 0."""
        top, bottom = np.asarray([numerators], float), np.asarray([denominators], float)
        value, error, deviations = studentized(top, bottom, self.weights(top.shape[1]))
        groups = top.shape[1]
        if groups < MIN_GROUPS:
            return Estimate(float(value[0]), None, None, groups)
        reach = float(np.quantile(deviations[0], LEVEL)) * float(error[0])
        p = _p_value(float(value[0]) - null, float(error[0]), deviations[0])
        return Estimate(float(value[0]), float(value[0]) - reach, float(value[0]) + reach, groups, float(error[0]), p)


def studentized(numerators: Array, denominators: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Ratio of sums, its standard error, and the absolute studentized deviations of draws.

    Args:
        numerators, denominators: [S, n], S experiments of n groups.
        weights: [n, B], see `Resampler.weights`.

    Returns: [S], [S], [S, B]. Raises `ValueError` where denominators sum to 0.
    """
    count = numerators.shape[1]
    total = denominators.sum(axis=1)
    if (total == 0).any():
        raise ValueError("the denominators sum to 0")
    value = numerators.sum(axis=1) / total
    rest = numerators - value[:, None] * denominators
    error = _linear_error((rest**2).sum(axis=1), total, count)
    drawn_total = denominators @ weights
    drawn_total = np.where(drawn_total == 0, np.nan, drawn_total)
    moved = (rest @ weights) / drawn_total
    squares = (
        (rest**2) @ weights - 2 * moved * ((rest * denominators) @ weights) + moved**2 * ((denominators**2) @ weights)
    )
    drawn_error = _linear_error(np.maximum(squares, 0.0), drawn_total, count)
    least = np.where(error > 0, _LEAST_ERROR * error, 1.0)[:, None]
    deviations = np.abs(moved) / np.maximum(drawn_error, least)
    return value, error, np.nan_to_num(deviations, nan=0.0)


def _linear_error(squares: Array, total: Array, count: int) -> Array:
    """Standard error of a ratio, from the squared residuals of its linearisation."""
    return np.sqrt(squares * count / max(count - 1, 1)) / np.abs(total)


def _p_value(distance: float, error: float, deviations: Array) -> float:
    if error == 0:
        return 1.0 if distance == 0 else 1 / (len(deviations) + 1)
    return float(1 + np.count_nonzero(deviations >= abs(distance) / error)) / (len(deviations) + 1)


def holm(p_values: Mapping[Any, float]) -> dict[Any, float]:
    """Holm's step-down adjustment (1979): reject where the result is below alpha, and a false rejection among all of
    them has at most probability alpha."""
    adjusted: dict[Any, float] = {}
    highest = 0.0
    for rank, key in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[key]))
        adjusted[key] = highest
    return adjusted


def groups_needed(effect: float, error: float, groups: int, comparisons: int) -> int | None:
    """Groups with which an effect of this size would be decided four times out of five, as one of so many comparisons
    (Bonferroni); None for no effect at all. Normal approximation."""
    if effect == 0:
        return None
    spread = error * math.sqrt(groups)
    return max(MIN_GROUPS, math.ceil((_quantile_sum(comparisons) * spread / abs(effect)) ** 2))


def detectable(error: float, comparisons: int) -> float:
    """The smallest effect that is decided four times out of five with the groups at hand. Normal approximation."""
    return _quantile_sum(comparisons) * error


def _quantile_sum(comparisons: int) -> float:
    normal = NormalDist()
    return normal.inv_cdf(1 - (1 - LEVEL) / 2 / max(comparisons, 1)) + normal.inv_cdf(_POWER)


def binomial_tail(successes: int, trials: int) -> float:
    """P(X >= successes) for X ~ Binomial(trials, 1/2): one-sided McNemar over discordant pairs, exact."""
    return sum(math.comb(trials, k) for k in range(successes, trials + 1)) / 2**trials
