"""Block pools: who holds which page, and what content the free ones still have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dovetail.contracts.errors import CapacityError

NULL_BLOCK = 0
"""Block id that is never handed out; it stands for "no page" in block tables."""
NO_HOST_BLOCK = -1
"""Stands for "no page" in tables of host blocks."""


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Blocks of a pool, the null block left out: `num_used + num_cached + num_empty` is all of them."""

    num_used: int
    """Held by someone."""
    num_cached: int
    """Free, with content that can still be found."""
    num_empty: int
    """Free, without content."""


@dataclass(frozen=True, slots=True)
class PrefixCacheReset:
    """What a reset did."""

    num_dropped: int
    """Free blocks whose content was forgotten."""
    num_in_use: int
    """Blocks that requests still hold: they stay where they are, but can no longer be found."""

    def __bool__(self) -> bool:
        """Whether the reset left no block behind, as vLLM's answer says."""
        return self.num_in_use == 0


class ContentFollower(Protocol):
    """Hears of content that is found no more."""

    group_id: int
    """Of the KV group whose content it follows."""

    def removed(self, content: bytes) -> None:
        """This content of the group."""

    def cleared(self) -> None:
        """All content, of all groups."""


class BlockPool:
    """Device blocks 1 .. num_blocks - 1 with reference counts and content hashes.

    Content belongs to one KV group: the same tokens have other keys and values in other layers. Free blocks without
    content are handed out first, then the least recently freed of those with content; so a caller that frees a
    request's blocks from the last to the first has tails evicted before their parents. Every operation is O(1) per
    block.
    """

    def __init__(self, num_blocks: int, num_groups: int):
        if num_blocks < 2:
            raise CapacityError(
                f"the KV memory holds {max(0, num_blocks)} blocks, but needs at least 2 (the null block and one for "
                "tokens); give the KV cache more memory"
            )
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        """Holders of each block. Read it; change it through `take`, `share` and `free`."""
        self.num_evictions = 0
        self._empty = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._groups = [0] * num_blocks
        self._found: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.events: ContentFollower | None = None
        """Who hears of content that is found no more; None: nobody follows."""

    def contents(self, group_id: int) -> tuple[bytes, ...]:
        """What can be found in a group."""
        return tuple(self._found[group_id])

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those with content included."""
        return len(self._empty) + len(self._evictable)

    def take(self, count: int) -> list[int]:
        """Hands out `count` blocks with one holder each and no content. `count` must not exceed `num_free`."""
        empty, refs = self._empty, self.refs
        blocks: list[int] = []
        for _ in range(count):
            block = empty.pop() if empty else self._evict()
            refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Adds a holder; the block may be free, with content."""
        if self.refs[block] == 0:
            del self._evictable[block]
        self.refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Takes one holder from each block, in this order."""
        refs, hashes = self.refs, self._hashes
        for block in blocks:
            refs[block] -= 1
            if refs[block] == 0:
                if hashes[block] is None:
                    self._empty.append(block)
                else:
                    self._evictable[block] = None

    def find(self, group_id: int, content: bytes) -> int:
        """The block of a group that has this content, or the null block."""
        return self._found[group_id].get(content, NULL_BLOCK)

    def register(self, block: int, group_id: int, content: bytes) -> bool:
        """Makes a held block's content findable, unless another block has the same or it is findable already. Returns
        whether it did."""
        found = self._found[group_id]
        is_new = self._hashes[block] is None and content not in found
        if is_new:
            found[content] = block
            self._hashes[block] = content
            self._groups[block] = group_id
        return is_new

    def unregister(self, block: int) -> None:
        """Forgets a held block's content, which is about to be overwritten."""
        content = self._hashes[block]
        if content is not None:
            group_id = self._groups[block]
            del self._found[group_id][content]
            self._hashes[block] = None
            if self.events is not None and group_id == self.events.group_id:
                self.events.removed(content)

    def forget(self, group_id: int, content: bytes) -> None:
        """Makes content unfindable; its block stays with those who hold it."""
        block = self._found[group_id].pop(content, NULL_BLOCK)
        if block == NULL_BLOCK:
            return
        self._hashes[block] = None
        if self.events is not None and group_id == self.events.group_id:
            self.events.removed(content)
        if self.refs[block] == 0:
            del self._evictable[block]
            self._empty.append(block)

    def reset_prefix_cache(self) -> PrefixCacheReset:
        """Forgets all content."""
        num_dropped = len(self._evictable)
        num_in_use = sum(map(len, self._found)) - num_dropped
        self._empty.extend(self._evictable)
        self._evictable.clear()
        for found in self._found:
            for block in found.values():
                self._hashes[block] = None
            found.clear()
        if self.events is not None:
            self.events.cleared()
        return PrefixCacheReset(num_dropped, num_in_use)

    def usage(self) -> PoolUsage:
        """How many blocks are held, cached and empty."""
        return PoolUsage(self.num_blocks - 1 - self.num_free, len(self._evictable), len(self._empty))

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        self.unregister(block)
        self.num_evictions += 1
        return block


class HostPool:
    """Host blocks 0 .. num_blocks - 1, each with one holder or none."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """Hands out one block; there must be a free one."""
        return self._free.pop()

    def free(self, blocks: Iterable[int]) -> None:
        """Takes blocks back."""
        self._free.extend(blocks)
