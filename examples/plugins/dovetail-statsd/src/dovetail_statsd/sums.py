"""What was measured since the last flush."""

from __future__ import annotations

import threading
from collections import Counter

from dovetail_statsd.lines import Lines, Tags

_Series = tuple[str, Tags, Tags]


class Sums:
    """Counts, gauges and timings; one thread adds, another drains. Lines are written by the one that drains."""

    def __init__(self, lines: Lines, max_timings: int):
        self._lines = lines
        self._max_timings = max_timings
        self._lock = threading.Lock()
        self._counts: Counter[_Series] = Counter()
        self._gauges: dict[str, float] = {}
        self._timings: list[tuple[_Series, float]] = []

    def add(
        self,
        counts: dict[str, int],
        gauges: dict[str, float],
        timings: dict[str, float],
        labels: Tags = (),
        tags: Tags = (),
    ) -> None:
        """Adds to counts, replaces gauges, and keeps timings (seconds), as many as may be kept. `labels` are of counts
        alone, `tags` of both."""
        with self._lock:
            for name, count in counts.items():
                if count:
                    self._counts[name, labels, tags] += count
            self._gauges.update(gauges)
            space = self._max_timings - len(self._timings)
            if space < len(timings):
                self._counts["dropped_timings", (), ()] += len(timings) - space
            self._timings += [((name, (), tags), seconds) for name, seconds in list(timings.items())[:space]]

    def drain(self) -> list[str]:
        """Everything since the last call, as lines. A gauge comes once: its receiver keeps it."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            gauges, self._gauges = self._gauges, {}
            timings, self._timings = self._timings, []
        write = self._lines.line
        return [
            *(write(name, count, "c", labels, tags) for (name, labels, tags), count in counts.items()),
            *(write(name, value, "g") for name, value in gauges.items()),
            *(write(name, 1000.0 * seconds, "ms", labels, tags) for (name, labels, tags), seconds in timings),
        ]
