"""Questions to an engine in another process that it has not answered yet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from dovetail.contracts.errors import RequestError, WorkerError
from dovetail.engine.remote.messages import Failure, Message, error_of


class PendingCalls:
    """Those of one client. Used by one event loop."""

    def __init__(self, send: Callable[[Message], None]):
        self._send = send
        self._ids = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}

    @property
    def num_pending(self) -> int:
        """Questions without an answer."""
        return len(self._answers)

    async def answer(self, question: Callable[[int], Message]) -> Any:
        """Sends the message that `question` makes with a number, and returns what the engine answers. Raises the
        engine's error, and `RequestError` for a message that is no plain data."""
        call_id = next(self._ids)
        self._answers[call_id] = answer = asyncio.get_running_loop().create_future()
        try:
            self._send(question(call_id))
            return await answer
        except (OverflowError, TypeError, RecursionError) as error:
            raise RequestError(
                f"this cannot be sent to the engine's process: {error}; what is sent there is plain data as in JSON,"
                " with integers of 64 bits at most. Weights get there by the weight_transport disk, ipc or collective,"
                " not by in_process"
            ) from None
        finally:
            self._answers.pop(call_id, None)

    def resolve(self, call_id: int, value: Any, failure: Failure | None) -> None:
        """The engine answered; a call that was given up is passed over."""
        answer = self._answers.get(call_id)
        if answer is None or answer.done():
            return
        if failure is None:
            answer.set_result(value)
        else:
            answer.set_exception(error_of(failure))

    def fail(self, error: WorkerError) -> None:
        """The engine is gone: all calls raise `error`."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
