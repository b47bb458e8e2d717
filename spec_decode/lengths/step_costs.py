"""What steps and drafts cost, learned from the clock while the engine runs.

A step without drafts is a point of one curve (seconds over requests), a step with drafts one of another (seconds over
rows), since verification has costs of its own. What slows all steps alike (a busy machine, longer contexts) is kept
apart as the drift, so that the curve that was measured long ago stays comparable with the one in use.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

WINDOW = 15
"""Measurements kept for each count; their median is what counts."""
_OLD = 600
"""Steps after which a measurement is forgotten when a new one comes."""
EXACT = 16
"""Counts up to here have a point of their own; larger ones share it with neighbours up to an eighth away."""
_OPTIMISM = 0.1
"""Share of proportional growth that is assumed where nothing was measured. What is thought too cheap is tried, and then
known; what is thought too dear would never be tried."""
_DRIFT_RATE, _MOST_DRIFT = 0.3, 0.7
"""Share of a step's deviation (in log) that the drift takes over, and the most deviation that counts."""
_GROWTH, _FIRST_DRAFTS = 1.5, 4
"""Rows of a step may be so many times those of the largest step with drafts that was measured; or drafts so many."""
_MOST_GROWTH = 1.2
"""Times the growth of its rows by which a step can be dearer than one without drafts."""
_DRIFT_MEMORY = 0.98
"""What is left of the drift a step later: what lasts is the curve's, or curve and drift would wander off together."""
_WARM = 4
"""Steps before anything is concluded: the first ones record, compile and touch memory."""
_KEEP = 8
"""Steps for which a reading of the curves is kept, unless they got a new point."""
_NOTHING: NDArray[np.float64] = np.empty(0)


class CostCurve:
    """Seconds over a count: the median of recent measurements at each count, straight lines between."""

    def __init__(self) -> None:
        self._samples: dict[int, list[tuple[int, int, float]]] = {}
        """By bucket: when, count, seconds."""
        self._buckets: list[int] = []
        self._counts: list[int] = []
        self._seconds: list[float] = []
        """Points by rising count."""

    @property
    def is_empty(self) -> bool:
        """Whether there are no measurements."""
        return not self._samples

    @property
    def largest(self) -> int:
        """Largest count at which something was measured; 0 where nothing was."""
        return self._counts[-1] if self._counts else 0

    def has(self, count: int) -> bool:
        """Whether something was measured at this count or, where it shares its point, near it."""
        return _bucket(count) in self._samples

    def is_sure(self, count: int) -> bool:
        """Whether something was measured there more than once."""
        return len(self._samples.get(_bucket(count), ())) > 1

    def add(self, count: int, seconds: float, now: int = 0, most: float = math.inf) -> None:
        """One measurement. `now` counts measurements of all curves, and those that are long ago are dropped. Of a
        single measurement at a count no more than `most` is believed."""
        bucket = _bucket(count)
        ring = [sample for sample in self._samples.get(bucket, ()) if now - sample[0] < _OLD][-WINDOW + 1 :]
        ring.append((now, count, seconds))
        self._samples[bucket] = ring
        place = bisect_left(self._buckets, bucket)
        if place == len(self._buckets) or self._buckets[place] != bucket:
            self._buckets.insert(place, bucket)
            self._counts.insert(place, count)
            self._seconds.insert(place, seconds)
        # The middle; of two the faster, since disturbances only slow down.
        middle = (len(ring) - 1) // 2
        self._counts[place] = sorted(one for _, one, _ in ring)[middle]
        found = sorted(one for _, _, one in ring)[middle]
        self._seconds[place] = min(found, most) if len(ring) == 1 else found

    def at(self, count: int) -> float:
        """Seconds at a count. Raises `ValueError` on an empty curve."""
        if not self._counts:
            raise ValueError("nothing was measured")
        xs, ys, place = self._counts, self._seconds, bisect_left(self._counts, count)
        if place == len(xs):
            return ys[-1] + _growth(xs, ys) * (count - xs[-1])
        if place == 0 or xs[place] == count:
            return ys[place]
        share = (count - xs[place - 1]) / (xs[place] - xs[place - 1])
        return ys[place - 1] + share * (ys[place] - ys[place - 1])

    def above(self, count: int, seconds: float, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """As `at`, for counts above `count`, at which the curve takes up from `seconds`; points at or below it do
        not matter. May be empty."""
        first = bisect_right(self._counts, count)
        return _read([count, *self._counts[first:]], [seconds, *self._seconds[first:]], counts)


class StepCosts:
    """Seconds of a step as a function of its requests and rows."""

    def __init__(self) -> None:
        self._plain = CostCurve()
        self._verify = CostCurve()
        self._drift = 0.0
        """log of how much slower steps are now than when the curves were measured."""
        self._read: dict[int, tuple[int, NDArray[np.float64]]] = {}
        """By number of requests: when the curves were last read for it, and what they said."""
        self._age = 0

    def observe(self, num_requests: int, num_rows: int, seconds: float) -> None:
        """A step that computed the last known token of each of `num_requests`, and drafts in the other rows."""
        curve = self._verify if num_rows > num_requests else self._plain
        self._age += 1
        most = math.inf
        if curve.is_sure(num_rows):
            deviation = math.log(seconds / curve.at(num_rows)) - self._drift
            self._drift += _DRIFT_RATE * max(-_MOST_DRIFT, min(_MOST_DRIFT, deviation))
            self._drift *= _DRIFT_MEMORY
        elif not curve.has(num_rows) and not self._plain.is_empty:
            most = self._credible(num_requests, num_rows, seconds) * math.exp(-self._drift)
            self._read.clear()
        curve.add(num_rows, seconds * math.exp(-self._drift), self._age, most)

    def _credible(self, num_requests: int, num_rows: int, seconds: float) -> float:
        """What is believed of the first measurement at a number of rows. It may have been disturbed, and what is
        thought dear is not tried again soon: it cannot be much more than rows cost one by one, and half of what it says
        beyond what was expected (in log) is put down to chance."""
        known = self.step(num_requests, num_rows - num_requests)
        bounded = min(seconds, _MOST_GROWTH * float(known[0]) * num_rows / num_requests)
        return math.sqrt(bounded * min(bounded, float(known[-1])))

    def knows(self, num_requests: int, num_drafts: int) -> bool:
        """Whether a step of this number of requests and drafts was measured, and not only while the engine was
        warming up."""
        curve = self._verify if num_drafts else self._plain
        return self._age >= _WARM and curve.has(num_requests + num_drafts)

    def most_drafts(self, num_requests: int) -> int:
        """Drafts that a step of so many requests may have without going far beyond what was measured, so that a first
        trial costs little."""
        known = max(self._verify.largest, num_requests)
        return max(_FIRST_DRAFTS, int(_GROWTH * known) - num_requests)

    def step(self, num_requests: int, most_drafts: int) -> NDArray[np.float64]:
        """[most_drafts + 1]: seconds of the next step with 0, 1, ... drafts. Raises `ValueError` before any step was
        measured."""
        age, seconds = self._read.get(num_requests, (0, _NOTHING))
        if len(seconds) <= most_drafts or self._age - age > _KEEP:
            plain = (self._verify if self._plain.is_empty else self._plain).at(num_requests)
            rows = np.arange(num_requests + 1, num_requests + most_drafts + 1)
            seconds = np.concatenate(([plain], self._verify.above(num_requests, plain, rows)))
            self._read[num_requests] = (self._age, seconds)
        return seconds[: most_drafts + 1] * math.exp(self._drift)


class DraftCosts:
    """Seconds that one drafter takes, as a function of its requests and the longest draft asked of it."""

    def __init__(self) -> None:
        self._curves: dict[int, CostCurve] = {}

    def observe(self, num_requests: int, length: int, seconds: float) -> None:
        """One call for drafts of up to `length` tokens (0: the drafter only read states)."""
        self._curves.setdefault(_bucket(num_requests), CostCurve()).add(length, seconds)

    def call(self, num_requests: int, length: int) -> float:
        """Seconds of such a call; 0 where none was measured, so that one is made. A call without drafts is not taken to
        be as dear as one with the fewest: drafts would seem to cost nothing."""
        if not self._curves:
            return 0.0
        wanted = _bucket(num_requests)
        nearest = wanted if wanted in self._curves else min(self._curves, key=lambda bucket: abs(bucket - wanted))
        curve = self._curves[nearest]
        seconds = curve.at(length) if length > 0 or curve.has(0) else 0.0
        return seconds if nearest >= wanted else seconds * _count_of(wanted) / _count_of(nearest)


class ReadingCosts:
    """Seconds that a drafter takes for positions that it reads late."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=WINDOW)

    def observe(self, num_positions: int, seconds: float) -> None:
        """One call that read so many. Of a few nothing is learned: their time drowns in that of the drafts."""
        if num_positions < EXACT:
            return
        self._samples.append(max(0.0, seconds) / num_positions)

    def seconds(self, num_positions: int) -> float:
        """Seconds for so many, at the median of recent calls; 0 where none was measured, so that one is made."""
        return num_positions * median(self._samples) if self._samples else 0.0


def _bucket(count: int) -> int:
    """Counts that share a point: one each up to `EXACT`, then eight to an octave."""
    return count if count <= EXACT else EXACT + math.ceil(8 * math.log2(count / EXACT))


def _count_of(bucket: int) -> float:
    return float(max(bucket, 1)) if bucket <= EXACT else EXACT * 2 ** ((bucket - EXACT) / 8)


def _read(xs: Sequence[int], ys: Sequence[float], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    seconds: NDArray[np.float64] = np.interp(counts, xs, ys)
    beyond = counts > xs[-1]
    if beyond.any():
        seconds[beyond] = ys[-1] + _growth(xs, ys) * (counts[beyond] - xs[-1])
    return seconds


def _growth(xs: Sequence[int], ys: Sequence[float]) -> float:
    """Seconds for each count beyond the last that was measured."""
    growth = _OPTIMISM * ys[-1] / max(xs[-1], 1)
    if len(xs) > 1 and xs[-1] >= 2 * xs[0]:
        growth = max(growth, (ys[-1] - ys[0]) / (xs[-1] - xs[0]))
    return growth
