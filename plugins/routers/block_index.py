"""An index from block hashes to the replicas that have the block, or will have it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockIndex:
    """Which replicas have which blocks. A set of replicas is an int, whose bit i is replica i.

    Stored blocks are in it once per replica, however often they are reported. Expected ones are counted: each request
    whose prompt is not computed yet expects its own. A block without a replica takes no memory.

    Example, with blocks a, b, c: replica 0 has a and b, replica 2 has a, b and c, replica 1 has b alone. `runs([a, b,
    c])` is {0: 2, 2: 3}: a block without those before it is of no use.
    """

    def __init__(self) -> None:
        self._stored: dict[bytes, int] = {}
        self._by_replica: dict[int, set[bytes]] = {}
        self._expected: dict[bytes, dict[int, int]] = {}

    def __len__(self) -> int:
        """Blocks that some replica has, or is expected to have."""
        return len(self._stored.keys() | self._expected.keys())

    def store(self, replica: int, block_hashes: Iterable[bytes]) -> None:
        """The replica has these blocks."""
        mine = self._by_replica.setdefault(replica, set())
        bit = 1 << replica
        for content in block_hashes:
            mine.add(content)
            self._stored[content] = self._stored.get(content, 0) | bit

    def remove(self, replica: int, block_hashes: Iterable[bytes]) -> None:
        """The replica has these blocks no longer; some may be unknown."""
        mine = self._by_replica.get(replica, set())
        for content in block_hashes:
            if content in mine:
                mine.remove(content)
                self._drop(replica, content)

    def clear(self, replica: int) -> None:
        """The replica has no stored block any more."""
        for content in self._by_replica.pop(replica, ()):
            self._drop(replica, content)

    def expect(self, replica: int, block_hashes: Iterable[bytes]) -> None:
        """A request that is at the replica will bring these blocks there."""
        for content in block_hashes:
            counts = self._expected.setdefault(content, {})
            counts[replica] = counts.get(replica, 0) + 1

    def expect_no_longer(self, replica: int, block_hashes: Iterable[bytes]) -> None:
        """Takes back one `expect` of the same blocks."""
        for content in block_hashes:
            counts = self._expected[content]
            counts[replica] -= 1
            if counts[replica] == 0:
                del counts[replica]
            if not counts:
                del self._expected[content]

    def runs(self, block_hashes: Sequence[bytes]) -> dict[int, int]:
        """Replica -> how many of the first blocks it has or will have; replicas without the first are left out.

        Takes O(len(block_hashes) + replicas that have the first) steps.
        """
        found: dict[int, int] = {}
        alive = self._holders(block_hashes[0]) if block_hashes else 0
        for length, content in enumerate(block_hashes[1:], 1):
            if not alive:
                return found
            still = alive & self._holders(content)
            if still != alive:
                found.update(dict.fromkeys(_members(alive & ~still), length))
                alive = still
        found.update(dict.fromkeys(_members(alive), len(block_hashes)))
        return found

    def _holders(self, content: bytes) -> int:
        holders = self._stored.get(content, 0)
        for replica in self._expected.get(content, ()):
            holders |= 1 << replica
        return holders

    def _drop(self, replica: int, content: bytes) -> None:
        holders = self._stored[content] & ~(1 << replica)
        if holders:
            self._stored[content] = holders
        else:
            del self._stored[content]


def _members(replicas: int) -> Iterable[int]:
    """Numbers of the bits that are set."""
    while replicas:
        lowest = replicas & -replicas
        yield lowest.bit_length() - 1
        replicas ^= lowest
