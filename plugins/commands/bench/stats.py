"""Percentiles, summaries, and intervals of ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import TYPE_CHECKING

from dovetail.commands.student import t_quantile

if TYPE_CHECKING:
    from numpy.typing import NDArray

PERCENTILES = (50, 90, 95, 99)
MIN_GROUPS = 3
"""Fewer independent groups than this tell nothing about their spread."""
MANY_GROUPS = 30
"""From so many groups on, drawing them again shows what their spread does to a statistic."""
_LARGEST_LOG = 700.0

Groups = Sequence[Sequence[float]]
"""Samples by what was repeated independently: repetitions, processes, or blocks of consecutive requests."""
Intervals = Mapping[str, tuple[float, float] | None]
"""By statistic."""


def percentile(samples: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) of at least one sample: linear interpolation between order statistics."""
    ordered = sorted(samples)
    position = (len(ordered) - 1) * q / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True)
class Summary:
    """What a table shows of samples."""

    count: int
    mean: float
    minimum: float
    maximum: float
    percentiles: Mapping[int, float | None]
    """By q; None where less than one sample is expected beyond. The median is always there."""


def summarize(samples: Sequence[float]) -> Summary:
    """Summary of at least one sample."""
    ordered = sorted(samples)
    shown = {q: percentile(ordered, q) if q == 50 or len(ordered) * (100 - q) >= 100 else None for q in PERCENTILES}
    return Summary(len(ordered), math.fsum(ordered) / len(ordered), ordered[0], ordered[-1], shown)


def flatten(groups: Groups) -> list[float]:
    """Returns all samples as one array."""
    return [sample for group in groups for sample in group]


def statistic_of(samples: Sequence[float], statistic: str) -> float:
    """ "mean", "median" or "pQ" (Q from 0 to 100) of at least one sample."""
    if statistic == "mean":
        return math.fsum(samples) / len(samples)
    return percentile(samples, _quantile(statistic))


def intervals_of(groups: Groups, statistics: Sequence[str], *, resamples: int = 1000, seed: int = 0) -> Intervals:
    """95% intervals of statistics, by the rules of `ratio_of`; None where a statistic has none."""
    groups = [group for group in groups if group]
    if len(groups) < MIN_GROUPS:
        return dict.fromkeys(statistics)
    if len(groups) >= MANY_GROUPS:
        return {name: _bootstrap_of_one(groups, name, resamples, seed) for name in statistics}
    return {name: _student_of_one(groups, name) for name in statistics}


def _bootstrap_of_one(groups: Groups, statistic: str, resamples: int, seed: int) -> tuple[float, float]:
    import numpy as np

    drawn = _resampled(groups, statistic, resamples, np.random.default_rng(seed))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def _student_of_one(groups: Groups, statistic: str) -> tuple[float, float] | None:
    logs = _logs(groups, statistic)
    if logs is None:
        return None
    value = statistic_of(flatten(groups), statistic)
    low, high = _around(fmean(logs), math.sqrt(variance(logs) / len(logs)), len(logs) - 1)
    return min(low, value), max(high, value)


@dataclass(frozen=True)
class Ratio:
    """statistic(b) / statistic(a), with its 95% interval."""

    value: float
    interval: tuple[float, float] | None
    """None where a side has fewer than `MIN_GROUPS` groups, or few of which one has a value of 0."""


def ratio_of(a: Groups, b: Groups, statistic: str, *, resamples: int = 4000, seed: int = 0) -> Ratio | None:
    """The ratio of a statistic, and its interval. None where a side has no samples or a's statistic is 0.

    What varies independently are whole groups, since samples within one share what happened in it: intervals over
    single tokens would be far too narrow. Of fewer than `MANY_GROUPS` the interval is Student's t on logarithms, one
    value per group (Welch, 1947), and there is none where a group's value is not above 0; of more, the percentile
    bootstrap, which is too narrow for few.
    """
    a, b = [group for group in a if group], [group for group in b if group]
    if not a or not b or statistic_of(flatten(a), statistic) == 0:
        return None
    value = statistic_of(flatten(b), statistic) / statistic_of(flatten(a), statistic)
    if min(len(a), len(b)) < MIN_GROUPS:
        return Ratio(value, None)
    if min(len(a), len(b)) >= MANY_GROUPS:
        return Ratio(value, _bootstrap_interval(a, b, statistic, resamples, seed))
    interval = _student_interval(a, b, statistic)
    # Of pooled samples the ratio may differ from that of the groups' means, and the interval holds both.
    return Ratio(value, interval and (min(interval[0], value), max(interval[1], value)))


def paired_ratio_of(a: Groups, b: Groups, statistic: str, *, resamples: int = 4000, seed: int = 0) -> Ratio | None:
    """As `ratio_of`, where group i of a and group i of b were measured one after the other on the same prompts.

    What both share drops out of the interval: Student's t on the logarithms of each pair's ratio, or a bootstrap that
    draws pairs. A pair of which one side has no samples is left out.
    """
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x and y]
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    if not pairs or statistic_of(flatten(a), statistic) == 0:
        return None
    value = statistic_of(flatten(b), statistic) / statistic_of(flatten(a), statistic)
    if len(pairs) < MIN_GROUPS:
        return Ratio(value, None)
    if len(pairs) >= MANY_GROUPS:
        return Ratio(value, _bootstrap_interval(a, b, statistic, resamples, seed, paired=True))
    logs = [_logs(a, statistic), _logs(b, statistic)]
    if logs[0] is None or logs[1] is None:
        return Ratio(value, None)
    gaps = [y - x for x, y in zip(logs[0], logs[1], strict=True)]
    low, high = _around(fmean(gaps), math.sqrt(variance(gaps) / len(gaps)), len(gaps) - 1)
    return Ratio(value, (min(low, value), max(high, value)))


def _logs(groups: Groups, statistic: str) -> list[float] | None:
    """The logarithm of each group's statistic; None where one is not above 0."""
    values = [statistic_of(group, statistic) for group in groups]
    return None if min(values) <= 0 else [math.log(value) for value in values]


def _around(centre: float, error: float, freedom: float) -> tuple[float, float]:
    """Student's interval around a mean of logarithms, as factors."""
    half = t_quantile(freedom) * error
    return math.exp(min(centre - half, _LARGEST_LOG)), math.exp(min(centre + half, _LARGEST_LOG))


def _student_interval(a: Groups, b: Groups, statistic: str) -> tuple[float, float] | None:
    found = [_logs(a, statistic), _logs(b, statistic)]
    logs = [side for side in found if side is not None]
    if len(logs) < len(found):
        return None
    squares = [variance(side) / len(side) for side in logs]
    centre = fmean(logs[1]) - fmean(logs[0])
    total = sum(squares)
    if total == 0:
        return math.exp(centre), math.exp(centre)
    freedom = total**2 / sum(square**2 / (len(side) - 1) for square, side in zip(squares, logs, strict=True))
    return _around(centre, math.sqrt(total), freedom)


def _bootstrap_interval(
    a: Groups, b: Groups, statistic: str, resamples: int, seed: int, *, paired: bool = False
) -> tuple[float, float] | None:
    import numpy as np

    generator = np.random.default_rng(seed)
    bottom = _resampled(a, statistic, resamples, generator)
    # From one state of the generator, the same groups are drawn of both.
    top = _resampled(b, statistic, resamples, np.random.default_rng(seed) if paired else generator)
    usable = bottom != 0
    if not usable.any():
        return None
    low, high = np.quantile(top[usable] / bottom[usable], [0.025, 0.975])
    return float(low), float(high)


def _resampled(groups: Groups, statistic: str, resamples: int, generator: object) -> NDArray:
    """The statistic of `resamples` draws of whole groups: [resamples], float64.

    A draw is a weight per sample over the order that was sorted once, so that no draw sorts again.
    """
    import numpy as np

    assert isinstance(generator, np.random.Generator)
    values = np.asarray(flatten(groups), dtype=np.float64)
    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.argsort(values, kind="stable")
    values, owners = values[order], owners[order]
    drawn = np.empty(resamples)
    for index in range(resamples):
        draw = generator.integers(0, len(groups), len(groups))
        weights = np.bincount(draw, minlength=len(groups))[owners]
        if statistic == "mean":
            drawn[index] = weights @ values / weights.sum()
            continue
        ranks = np.cumsum(weights)
        position = (ranks[-1] - 1) * _quantile(statistic) / 100
        below = math.floor(position)
        pair = values[np.searchsorted(ranks, [below, min(below + 1, ranks[-1] - 1)], side="right")]
        drawn[index] = pair[0] + (pair[1] - pair[0]) * (position - below)
    return drawn


def _quantile(statistic: str) -> float:
    return 50.0 if statistic == "median" else float(statistic.removeprefix("p"))
