"""The prefix cache of a simulated replica: blocks, their holders, and eviction as the engine's block pool does it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockCache:
    """So many blocks, each held by requests, free with content that can be found, or empty.

    As in an engine, empty blocks are taken first, then the least recently freed of those with content. A request frees
    its blocks from the last to the first, so that tails are evicted before their parents.
    """

    def __init__(self, num_blocks: int):
        self._num_empty = num_blocks
        self._held: dict[bytes, int] = {}
        """Content -> requests that hold its block."""
        self._evictable: OrderedDict[bytes, None] = OrderedDict()
        self._evicted: list[bytes] = []

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return self._num_empty + len(self._evictable)

    def run(self, block_hashes: Sequence[bytes], most: int) -> int:
        """How many of the first blocks are found, at most so many."""
        for count, content in enumerate(block_hashes[:most]):
            if content not in self._held and content not in self._evictable:
                return count
        return min(most, len(block_hashes))

    def take(self, found: Sequence[bytes], num_new: int) -> bool:
        """Holds the found blocks and so many without content, or, where these are too many, changes nothing and returns
        False."""
        if num_new > self.num_free - sum(content in self._evictable for content in found):
            return False
        for content in found:
            self._evictable.pop(content, None)
            self._held[content] = self._held.get(content, 0) + 1
        while self._num_empty < num_new:
            self._evicted.append(self._evictable.popitem(last=False)[0])
            self._num_empty += 1
        self._num_empty -= num_new
        return True

    def register(self, block_hashes: Sequence[bytes]) -> list[bytes]:
        """Blocks that one request holds without content are computed: returns those that can be found from now on.
        Where another block has the content already, that one stays the one that is found."""
        new = [content for content in block_hashes if content not in self._held and content not in self._evictable]
        self._held.update(dict.fromkeys(new, 1))
        return new

    def free(self, contents: Sequence[bytes], num_without: int) -> None:
        """A request ends, and lets go of blocks with content, given in order of positions, and of so many without."""
        for content in reversed(contents):
            self._held[content] -= 1
            if self._held[content] == 0:
                del self._held[content]
                self._evictable[content] = None
        self._num_empty += num_without

    def evicted(self) -> tuple[bytes, ...]:
        """Contents that were evicted since the last call."""
        evicted = tuple(self._evicted)
        self._evicted.clear()
        return evicted
