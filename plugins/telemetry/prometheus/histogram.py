"""Counts of observations by size, for one writing thread and any number that read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """Observations in buckets. `observe` takes the same time whatever `times` is."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds `times` observations of `value`."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    @property
    def sum(self) -> float:
        """Of all values."""
        return self._sum

    def cumulative(self) -> list[int]:
        """Observations up to each bound, and all. The counts are read at once, so that they agree with each other while
        another thread writes."""
        return list(accumulate(self._counts[:]))
