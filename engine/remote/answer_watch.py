"""Notices an engine that is there and does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from dovetail.contracts.errors import WorkerError

HEALTH_S = 5.0
"""An engine that does not answer for so long counts as dead."""
PATIENCE_S = 1.0
"""After so long without an answer to a request, the engine is asked whether it answers at all."""


class AnswerWatch:
    """Runs while requests wait for an answer, which comes between two steps. An engine that computes a long step
    answers a question meanwhile; one that does not is stuck: what waits is given up, and nothing sent to it."""

    def __init__(
        self,
        waiting: Callable[[], Mapping[str, asyncio.Future[None]]],
        check_health: Callable[[], Awaitable[None]],
        is_running: Callable[[], bool],
        give_up: Callable[[str], object],
    ):
        """`waiting`: by request id, what the engine has not answered. `give_up`: forgets such a request."""
        self.is_stuck = False
        """The engine's process is there, and does not answer."""
        self._waiting = waiting
        self._check_health = check_health
        self._is_running = is_running
        self._give_up = give_up
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """A request waits. Idempotent."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Ends the watch."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while self._waiting() or self.is_stuck:
            await asyncio.sleep(PATIENCE_S)
            waiting = dict(self._waiting())
            try:
                await self._check_health()
            except WorkerError as error:
                # One that ended has lost its requests already.
                self.is_stuck = self._is_running()
                for request_id, answered in waiting.items():
                    if not answered.done():
                        self._give_up(request_id)
                        answered.set_exception(error)
            else:
                self.is_stuck = False
