"""Notices an engine that is there and does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from dovetail.contracts.errors import WorkerError

HEALTH_S = 5.0
"""An engine that does not answer for so long counts as dead."""
PATIENCE_S = 1.0
"""Between two questions to an engine that something is expected of."""


class AnswerWatch:
    """Runs while something is expected of an engine: answers to requests and calls, outputs. An engine that computes a
    long step answers a question meanwhile; one that does not is stuck, until it answers again."""

    def __init__(
        self,
        is_expected: Callable[[], bool],
        check_health: Callable[[], Awaitable[None]],
        is_running: Callable[[], bool],
        report: Callable[[WorkerError | None], None],
    ):
        """`is_expected`: whether the engine owes something. `report` gets what is wrong each time that the engine does
        not answer, and None once it answers again. An engine that ended is left to those who notice that."""
        self.is_stuck = False
        """The engine's process is there, and does not answer."""
        self._is_expected = is_expected
        self._check_health = check_health
        self._is_running = is_running
        self._report = report
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Something is expected. Idempotent."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def note_end(self) -> None:
        """The engine ended: the next one has a clean record."""
        self.is_stuck = False

    async def close(self) -> None:
        """Ends the watch."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while self._is_expected() or self.is_stuck:
            await asyncio.sleep(PATIENCE_S)
            try:
                await self._check_health()
            except WorkerError as error:
                if self._is_running():
                    self.is_stuck = True
                    self._report(error)
            else:
                if self.is_stuck:
                    self.is_stuck = False
                    self._report(None)
