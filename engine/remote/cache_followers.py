"""Which clients follow the prefix cache of an engine, and what they are sent."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.contracts.router import AllBlocksCleared, BlocksStored, CacheEvent
from dovetail.engine.kv.events import CacheEvents
from dovetail.engine.remote.messages import cache_changes
from dovetail.engine.remote.outbox import Outbox


class CacheFollowers:
    """Clients by the identity of their socket. A client that is behind gets no changes until it is not; then it gets
    all that the cache has, so that what it did not take costs nothing."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._is_current: dict[bytes, bool] = {}
        """By client: whether it has all changes up to now."""

    def add(self, client: bytes) -> None:
        """The client follows from now on."""
        self._is_current[client] = False

    def drop(self, client: bytes) -> None:
        """It is gone; unknown ones are passed over."""
        self._is_current.pop(client, None)

    def publish(self, cache: CacheEvents, outboxes: Mapping[bytes, Outbox]) -> None:
        """Sends each client what it lacks."""
        if not self._is_current:
            return
        cache.follow()
        events = cache.take()
        for client, is_current in self._is_current.items():
            outbox = outboxes.get(client)
            if outbox is None or outbox.is_behind:
                self._is_current[client] = False
                continue
            if not is_current:
                self._send(outbox, _snapshot(cache.contents(), self._block_size))
                self._is_current[client] = True
            elif events:
                self._send(outbox, events)

    def _send(self, outbox: Outbox, events: list[CacheEvent]) -> None:
        outbox.send(cache_changes(events, self._block_size))


def _snapshot(contents: tuple[bytes, ...], block_size: int) -> list[CacheEvent]:
    events: list[CacheEvent] = [AllBlocksCleared()]
    if contents:
        events.append(BlocksStored(block_hashes=contents, parent_hash=None, token_ids=(), block_size=block_size))
    return events
