"""KV events: what the prefix cache finds from now on, and what no more, for routers and caches outside the engine."""

from __future__ import annotations

from collections.abc import Sequence as Items

from dovetail.contracts.kv import KVLayout
from dovetail.contracts.router import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from dovetail.engine.kv.pool import BlockPool
from dovetail.engine.sequence import Sequence


class CacheEvents:
    """The changes of one engine's prefix cache, in order, once somebody follows them; until then nothing is noted.

    The blocks are those of one KV group: the first that keeps all pages, or else the first. A model with sliding
    windows besides may have lost pages of a window for blocks that are reported here, and computes a few again.
    """

    def __init__(self, layout: KVLayout, pool: BlockPool):
        full = [group.group_id for group in layout.groups if group.window is None]
        self.group_id = full[0] if full else 0
        self._block_size = layout.block_size
        self._pool = pool
        self._events: list[CacheEvent] = []
        self._removed: list[bytes] = []
        """The last ones, which are one event."""

    @property
    def is_followed(self) -> bool:
        """Whether changes are noted."""
        return self._pool.events is not None

    def follow(self) -> None:
        """Notes changes from now on. Idempotent."""
        self._pool.events = self

    def unfollow(self) -> None:
        """Notes nothing any more. Idempotent."""
        self._pool.events = None
        self.take()

    @property
    def has_any(self) -> bool:
        """Whether `take` would return any."""
        return bool(self._events or self._removed)

    def snapshot(self) -> list[CacheEvent]:
        """Events after which somebody who knew anything else knows what the cache has, by hashes alone."""
        hashes = self.contents()
        stored = BlocksStored(block_hashes=hashes, parent_hash=None, token_ids=(), block_size=self._block_size)
        return [AllBlocksCleared(), stored] if hashes else [AllBlocksCleared()]

    def contents(self) -> tuple[bytes, ...]:
        """The hashes that the cache has."""
        return self._pool.contents(self.group_id)

    def replaces(self, older: CacheEvents) -> None:
        """This cache takes the place of another one, whose followers hear that nothing of it is left."""
        if older.is_followed:
            self.follow()
            self._events = [*older.take(), AllBlocksCleared()]

    def take(self) -> list[CacheEvent]:
        """The changes since the last call."""
        self._flush()
        events, self._events = self._events, []
        return events

    # What the cache says.

    def stored(self, sequence: Sequence, indices: Items[int]) -> None:
        """Blocks of a sequence, by ascending index, are found from now on."""
        if not indices:
            return
        self._flush()
        start = indices[0]
        for before, index in zip(indices, (*indices[1:], -1), strict=True):
            if index != before + 1:
                self._events.append(self._run(sequence, start, before + 1))
                start = index

    def removed(self, content: bytes) -> None:
        """A block is found no more."""
        self._removed.append(content)

    def cleared(self) -> None:
        """Nothing is found any more."""
        self._removed.clear()
        self._events.append(AllBlocksCleared())

    def _run(self, sequence: Sequence, first: int, end: int) -> BlocksStored:
        size, hashes = self._block_size, sequence.block_hashes
        return BlocksStored(
            block_hashes=tuple(hashes[first:end]),
            parent_hash=hashes[first - 1] if first else None,
            token_ids=tuple(sequence.token_ids[first * size : end * size]),
            block_size=size,
            adapter=sequence.adapter.name if sequence.adapter is not None else None,
        )

    def _flush(self) -> None:
        if self._removed:
            self._events.append(BlocksRemoved(block_hashes=tuple(self._removed)))
            self._removed = []
