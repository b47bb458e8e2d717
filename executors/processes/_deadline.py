"""Notices operations that take too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

TICK_S = 0.5
"""How often the operation under way is looked at."""
_LONGEST_TICK_S = 5.0
"""A longer gap is not counted: this process was stopped itself (Ctrl-Z), and its workers perhaps with it."""


class Timed(Protocol):
    """Something that must end in time."""

    @property
    def timeout_s(self) -> float | None:
        """None: it may take any time."""


T = TypeVar("T", bound=Timed)


class DeadlineWatch(Generic[T]):
    """A thread that calls `overdue` for an operation that is under way for longer than it may, and again each time that
    as much time has passed.

    It is not the thread that reads answers: that one may itself wait for the rest of an answer.
    """

    def __init__(
        self, under_way: Callable[[], T | None], overdue: Callable[[T], None], failed: Callable[[Exception], None]
    ):
        """`under_way`: the oldest operation without an answer, whose turn it is. `failed` is told what the other two
        raise; the watch goes on."""
        self._under_way = under_way
        self._overdue = overdue
        self._failed = failed
        self._watched: T | None = None
        self._seconds = 0.0
        """For which the watched operation was under way."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dovetail-deadline", daemon=True)

    def start(self) -> None:
        """From now on."""
        self._thread.start()

    def stop(self) -> None:
        """Waits for the thread, unless it calls this itself. Idempotent."""
        self._is_over.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._is_over.wait(TICK_S):
            now = time.monotonic()
            gap, before = min(now - before, _LONGEST_TICK_S), now
            try:
                self._look(gap)
            except Exception as error:
                self._failed(error)

    def _look(self, gap: float) -> None:
        operation = self._under_way()
        self._seconds = self._seconds + gap if operation is self._watched else 0.0
        self._watched = operation
        if operation is not None and operation.timeout_s is not None and self._seconds >= operation.timeout_s:
            self._seconds = 0.0
            self._overdue(operation)
