"""Requests that are held and resumed, from any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from dovetail.contracts.hooks import RequestControl
from dovetail.engine.request_fields import as_request_ids
from dovetail.engine.sequence import Sequence


class Holds(RequestControl):
    """What was asked since the last step. It is applied between two steps: no scheduler may see it change."""

    def __init__(self) -> None:
        self.wakeup = threading.Condition()
        """Notified when a step may have something to do again, or never will. Re-entrant."""
        self.asked: deque[tuple[str, bool]] = deque()
        """(request id, whether it is to be held) of what is not applied yet."""

    def hold(self, request_ids: str | Iterable[str]) -> None:
        """See `RequestControl`. Raises `RequestError` for what is no id."""
        self._ask(request_ids, is_held=True)

    def resume(self, request_ids: str | Iterable[str]) -> None:
        """See `RequestControl`. Raises `RequestError` for what is no id."""
        self._ask(request_ids, is_held=False)

    def apply(self, sequences_of: Callable[[str], list[Sequence]]) -> None:
        """Writes what was asked to the sequences of each request, in the order in which it was asked."""
        while self.asked:
            request_id, is_held = self.asked.popleft()
            for sequence in sequences_of(request_id):
                sequence.hold(is_held)

    def notify(self) -> None:
        """Wakes all that wait on `wakeup`."""
        with self.wakeup:
            self.wakeup.notify_all()

    def _ask(self, request_ids: str | Iterable[str], *, is_held: bool) -> None:
        self.asked.extend((request_id, is_held) for request_id in as_request_ids(request_ids))
        self.notify()
