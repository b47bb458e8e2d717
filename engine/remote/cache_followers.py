"""Which clients follow the prefix cache of an engine, and what they are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dovetail.contracts.router import CacheEvent
from dovetail.engine.kv_events import KVEvents
from dovetail.engine.remote.messages import cache_changes
from dovetail.engine.remote.outbox import Outbox


class CacheFollowers:
    """Clients by the identity of their socket. A client that is behind gets no changes until it is not; then it gets
    all that the cache has, so that what it did not take costs nothing."""

    def __init__(self, kv_events: KVEvents, block_size: int):
        self._kv_events = kv_events
        self._block_size = block_size
        self._is_current: dict[bytes, bool] = {}
        """By client: whether it has all changes up to now."""
        self._events: list[CacheEvent] = []
        """Of which the clients have not heard."""
        self._stop: Callable[[], None] | None = None
        """Ends the notifications of the engine; None: there are none."""

    def add(self, client: bytes) -> None:
        """The client follows from now on."""
        if self._stop is None:
            self._stop = self._kv_events.listen(self._events.extend)
        self._is_current[client] = False

    def drop(self, client: bytes) -> None:
        """It is gone; unknown ones are passed over."""
        self._is_current.pop(client, None)
        if not self._is_current and self._stop is not None:
            self._stop()
            self._stop = None

    def publish(self, outboxes: Mapping[bytes, Outbox]) -> None:
        """Sends each client what it lacks."""
        if not self._is_current:
            return
        self._kv_events.publish()
        events = self._events[:]
        self._events.clear()
        for client, is_current in self._is_current.items():
            outbox = outboxes.get(client)
            if outbox is None or outbox.is_behind:
                self._is_current[client] = False
                continue
            if not is_current:
                self._send(outbox, self._kv_events.snapshot())
                self._is_current[client] = True
            elif events:
                self._send(outbox, events)

    def _send(self, outbox: Outbox, events: list[CacheEvent]) -> None:
        outbox.send(cache_changes(events, self._block_size))
