"""Intervals and p-values of a mean that hold however often one looks: for experiments that end when they are decided.

A p-value for a fixed number of groups has its 5% once. Looked at after every group from the 5th to the 200th, it calls
two of five arms without any effect faster or slower. Here the 5% are for all looks together, so that an experiment
may stop at any of them, for any reason.

The evidence is an e-process for a mean with unknown variance: the Bayes factor of Student's t with a normal prior of
the effect in standard deviations (Rouder et al. 2009 with a fixed scale; Pérez-Ortiz et al. 2024, "E-statistics, group
invariance and anytime valid testing", section 4, show that it holds at any time; Wang and Ramdas 2024, "Anytime-valid
t-tests and confidence sequences for Gaussian means with unknown variance", compare it with others). By Ville's
inequality it exceeds 1 / alpha at any time with probability alpha at most. The interval holds each mean against which
it never did.

It is exact for normal groups. Skewed ones (a few prompts gain much) make t itself skewed while groups are few, so t
counts as the smaller of itself and of Hall's transformation (1992, "On the removal of skewness by transformation"),
which can only widen the interval. How often an arm without any effect is decided by looking after every group from the
5th to the 200th, in percent of 4,000 simulated experiments:

    normal                                        2.1     (Bayes factor of t alone 2.6)
    t with 3 degrees of freedom                   1.6     (1.7)
    exponential                                   4.0     (10.0)
    lognormal(1)                                  9.1     (21.6)
    AR(1) 0.8 over turns, arms in abba order      3.3     (3.9)
    AR(1) 0.2 from group to group                 9.7     (10.9)

The last is what no method for independent groups survives: groups run in a drawn order so that it does not occur. With
normal groups half of the experiments are decided with as many groups as `bootstrap.groups_needed` gives for a fixed
number, and four of five with 1.7 times as many.

P-values of several arms may be corrected by `bootstrap.holm` at any look, whatever arms have in common: each of them
is valid at that look, and Holm's correction asks for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dovetail.spec_decode.experiments.bootstrap import LEVEL, MIN_GROUPS, Array, Estimate, power_quantile

_PRIOR_VARIANCE = 0.3
"""Of the effect in standard deviations of a group. Larger decides large effects some groups earlier (1: 10 groups in
place of 12 for an effect of 1.2), and skewed noise falsely more often."""
_EXPERIMENTS = 400
"""Simulated ones."""
_MOST_LOOKS = 1024
"""After which looking is simulated; with more groups effects shrink with the root."""
_LEAST_DEVIATION = 1e-6
"""As a share of the mean."""


def always_valid(values: Sequence[float], level: float = LEVEL) -> Estimate:
    """The mean of one value per group, in the order in which groups ended, with what holds at any look.

    A value counts from its group's last repetition on: groups are what is independent. `p` is of the mean being 0, the
    smallest at any look so far; the interval is what all looks have in common, and holds 0 if and only if p is at least
    1 - `level`. Where intervals of different looks have nothing in common (what is measured drifts), only the last look
    counts. There is no interval with fewer than `MIN_GROUPS` groups, or as long as no result would be out of question.
    Raises `ValueError` for no values.
    """
    if not values:
        raise ValueError("no groups")
    count, mean = len(values), sum(values) / len(values)
    if count < MIN_GROUPS:
        return Estimate(mean, None, None, count)
    looks = Looks.at_every_group(np.asarray([values], float))
    lows, highs = (ends[0] for ends in looks.intervals(1 - level))
    p = np.exp(-np.maximum(looks.log_evidence()[0], 0.0))
    first = MIN_GROUPS - 1 if lows[MIN_GROUPS - 1 :].max() <= highs[MIN_GROUPS - 1 :].min() else count - 1
    low, high = float(lows[first:].max()), float(highs[first:].min())
    error, least = float(looks.deviation[0, -1] / math.sqrt(count)), float(p[first:].min())
    if math.isinf(low) or math.isinf(high):
        return Estimate(mean, None, None, count, error, least)
    return Estimate(mean, low, high, count, error, least)


def smallest_effect_at_any_look(groups: int, alpha: float) -> float:
    """`SmallestEffect` of an experiment that ends when it is decided, after so many groups at the latest."""
    if groups < MIN_GROUPS:
        return math.inf
    most = min(groups, _MOST_LOOKS)
    return float(_effects_at_any_look(alpha)[most - 1]) * math.sqrt(most / groups)


@lru_cache(maxsize=256)
def _effects_at_any_look(alpha: float) -> Array:
    """By number of groups less 1, simulated."""
    values = np.random.default_rng(1).normal(size=(_EXPERIMENTS, _MOST_LOOKS))
    lows, _ = Looks.at_every_group(values).intervals(alpha)
    needed = np.minimum.accumulate(-lows, axis=1)
    return power_quantile(needed)


@dataclass(frozen=True)
class Looks:
    """What is known after every group: moments of the first n values for n = 1 to N, [S, N] of S experiments."""

    count: Array
    """[N]."""
    mean: Array
    deviation: Array
    """Standard deviation."""
    skewness: Array

    @classmethod
    def at_every_group(cls, values: Array) -> Looks:
        """Of values [S, N]."""
        count = np.arange(1.0, values.shape[1] + 1)
        # Of differences from the first value, so that values that are all alike have a deviation of exactly 0.
        moved = values - values[:, :1]
        first, second, third = (np.cumsum(moved**power, axis=1) / count for power in (1, 2, 3))
        variance = np.maximum(second - first**2, 0.0)
        cubes = third - 3 * first * second + 2 * first**3
        skewness = np.divide(cubes, variance**1.5, out=np.zeros_like(cubes), where=variance > 0)
        deviation = np.sqrt(variance * count / np.maximum(count - 1, 1))
        return cls(count, values[:, :1] + first, deviation, skewness)

    def log_evidence(self) -> Array:
        """Logarithm of the e-process against a mean of 0."""
        root = np.sqrt(self.count)
        # Of values that are all alike t is large and not infinite, so that its cube is finite; of zeros it is 0.
        scale = np.maximum(self.deviation, _LEAST_DEVIATION * np.abs(self.mean))
        t = root * np.divide(self.mean, scale, out=np.zeros_like(scale), where=scale > 0)
        lean = self.skewness / root
        hall = t + lean * (t**2 / 3 + 1 / 6) + lean**2 * t**3 / 27
        least = np.where(t * hall > 0, np.minimum(np.abs(t), np.abs(hall)), 0.0)
        freedom, spread = np.maximum(self.count - 1, 1), 1 + self.count * _PRIOR_VARIANCE
        squares = least**2 / freedom
        found = self.count / 2 * (np.log1p(squares) - np.log1p(squares / spread)) - np.log(spread) / 2
        return np.where(self.count >= MIN_GROUPS, found, -np.inf)

    def intervals(self, alpha: float) -> tuple[Array, Array]:
        """Means against which the evidence is below 1 / alpha, look by look."""
        t = self._largest_t(alpha)
        finite = np.where(np.isinf(t), 0.0, t)
        error = self.deviation / np.sqrt(self.count)
        below, above = (np.maximum(finite, side * self._undo_hall(side * finite)) * error for side in (1, -1))
        return (
            np.where(np.isinf(t), -np.inf, self.mean - below),
            np.where(np.isinf(t), np.inf, self.mean + above),
        )

    def _largest_t(self, alpha: float) -> Array:
        """[N]: the t at which the evidence is 1 / alpha; infinite where none is large enough."""
        spread = 1 + self.count * _PRIOR_VARIANCE
        ratio = np.exp(2 / self.count * (np.log(spread) / 2 - math.log(alpha)))
        is_reached = (ratio < spread) & (self.count >= MIN_GROUPS)
        rest = np.where(is_reached, 1 - ratio / spread, 1.0)
        return np.where(is_reached, np.sqrt((self.count - 1) * (ratio - 1) / rest), np.inf)

    def _undo_hall(self, t: Array) -> Array:
        """The inverse of Hall's transformation: a third of the cube root, where there is any skewness."""
        lean = self.skewness / np.sqrt(self.count)
        is_skewed = np.abs(lean) > 1e-6
        safe = np.where(is_skewed, lean, 1.0)
        return np.where(is_skewed, 3 / safe * (np.cbrt(1 + safe * (t - lean / 6)) - 1), t)
