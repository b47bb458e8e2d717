"""How far a run is: a bar in a terminal, and lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from dovetail.commands.progress import Progress

_INTERVAL = 30.0
"""Seconds between lines, so that the log of a run of hours stays readable."""


def print_phase(what: str) -> None:
    """A line on stderr as something begins that takes its time after the turns."""
    print(f"after the turns: {what}", file=sys.stderr, flush=True)


class TurnProgress:
    """Counts turns on stderr. Where that is no terminal, it writes the first turn, one line in half a minute, and how
    long all took."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic):
        self._bar = Progress(total)
        self._is_log = not sys.stderr.isatty()
        self._clock = clock
        self._total = total
        self._begun = 0
        self._start = self._next_line = clock()

    def begin(self, what: str) -> None:
        """A turn begins."""
        self._bar.show(what)
        self._bar.advance()
        self._begun += 1
        # Rounds that were disturbed run again, which nobody knew before.
        self._total = max(self._total, self._begun)
        now = self._clock()
        if self._is_log and now >= self._next_line:
            self._next_line = now + _INTERVAL
            self._write(f"turn {self._begun} of {self._total}, {self._minutes(now)}: {what}")

    def _minutes(self, now: float) -> str:
        spent, done = now - self._start, self._begun - 1
        left = f", about {spent / done * (self._total - done) / 60:.1f} left" if done else ""
        return f"{spent / 60:.1f} minutes spent{left}"

    def _write(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> TurnProgress:
        self._bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.__exit__(kind, error, trace)
        if self._is_log and self._begun and kind is None:
            self._write(f"{self._begun} turns in {(self._clock() - self._start) / 60:.1f} minutes")
