"""Blocks are found by the hash of their content: what sequences computed, and soon what a step computes."""

from __future__ import annotations

from collections import deque

from dovetail.contracts.kv import KVGroup, KVLayout
from dovetail.engine.kv.events import CacheEvents
from dovetail.engine.kv.hashing import extend_block_hashes
from dovetail.engine.kv.pool import NO_HOST_BLOCK, NULL_BLOCK, BlockPool, PrefixCacheReset
from dovetail.engine.kv.under_way import ContentUnderWay
from dovetail.engine.kv.window import first_live_block
from dovetail.engine.sequence import Sequence

_NEVER = 1 << 60


class PrefixCache:
    """Registers full blocks by the hash of their content, and finds them. Who holds which block is the manager's."""

    def __init__(self, layout: KVLayout, pool: BlockPool, *, is_on: bool):
        """Where it is not on, nothing is registered or found."""
        self.is_on = is_on
        self._layout = layout
        self._block_size = layout.block_size
        self._pool = pool
        self._num_registered: dict[int, int] = {}
        """seq_id -> leading blocks whose content is findable or never shall be."""
        self._under_way = ContentUnderWay()
        self.events = CacheEvents(layout, pool)
        self.computed: deque[tuple[Sequence, list[bytes]]] | None = None
        """Where blocks that sequences computed are noted, by hash; None: nobody wants to know."""

    def begin(self, sequence: Sequence, num_registered: int, *, is_hidden: bool) -> None:
        """The sequence got its first blocks, of which so many are findable. `is_hidden`: what it has and will compute
        never is."""
        self._num_registered[sequence.seq_id] = _NEVER if is_hidden else num_registered

    def end(self, sequence: Sequence) -> None:
        """It has no blocks any more, on the device or on the host."""
        self._num_registered.pop(sequence.seq_id, None)

    def is_hidden(self, sequence: Sequence) -> bool:
        """Whether what the sequence computes is never found."""
        return self._num_registered[sequence.seq_id] == _NEVER

    def find(self, request: Sequence) -> list[list[int]]:
        """Block tables, one per group and of equal length, of the longest prefix that is found."""
        if not self.may_search(request):
            return [[] for _ in self._layout.groups]
        return find_cached_prefix(self._layout, self._pool, request)

    def find_swapped(self, request: Sequence) -> dict[tuple[int, int], int]:
        """(group, index) of swapped full blocks whose content is on the device -> the block that has it."""
        if not self.is_on or self.is_hidden(request):
            return {}
        num_full = request.num_computed_tokens // self._block_size
        extend_hashes_of(request, num_full, self._block_size)
        hashes = request.block_hashes
        hits: dict[tuple[int, int], int] = {}
        for group_id, host_table in enumerate(request.host_block_ids):
            for index in range(num_full):
                block = self._pool.find(group_id, hashes[index])
                if block != NULL_BLOCK and host_table[index] != NO_HOST_BLOCK:
                    hits[group_id, index] = block
        return hits

    def awaits(self, request: Sequence) -> bool:
        """Whether the next block of the request's prompt, behind those that `find` finds, is under way."""
        if not self._under_way or request.fork_parent is not None or not self.may_search(request):
            return False
        index = len(self.find(request)[0])
        if (index + 1) * self._block_size >= request.num_tokens:
            return False
        extend_hashes_of(request, index + 1, self._block_size)
        return request.block_hashes[index] in self._under_way

    def adopt(self, sequence: Sequence, hashes: list[bytes], rows: list[tuple[int, ...]]) -> None:
        """Consecutive blocks of a sequence, which came from elsewhere, become findable.
        Each row holds one of each group."""
        first = sequence.block_hashes.index(hashes[0]) if hashes else 0
        for group in self._layout.groups:
            group_id = group.group_id
            new = [
                first + index
                for index, content in enumerate(hashes)
                if self._pool.register(rows[index][group_id], group_id, content)
            ]
            if self._pool.events is not None and group_id == self.events.group_id:
                self.events.stored(sequence, new)

    def find_row(self, content: bytes) -> tuple[int, ...] | None:
        """The block of each group that has this content; None where some group has none."""
        row = tuple(self._pool.find(group.group_id, content) for group in self._layout.groups)
        return None if NULL_BLOCK in row else row

    def missing_hashes(self, request: Sequence) -> list[bytes]:
        """Hashes of the request's full blocks behind those that `find` finds, at least one token left over."""
        most = (request.num_tokens - 1) // self._block_size
        extend_hashes_of(request, most, self._block_size)
        return request.block_hashes[len(self.find(request)[0]) : most]

    def announce(self, sequence: Sequence, end: int) -> None:
        """Blocks that will be full of known tokens when those before `end` are computed are under way."""
        first = max(self._num_registered[sequence.seq_id], sequence.num_computed_tokens // self._block_size)
        last = min(end, len(sequence.token_ids) - sequence.hash_ahead) // self._block_size
        if first < last:
            extend_hashes_of(sequence, last, self._block_size)
            self._under_way.begin(sequence.seq_id, sequence.block_hashes[first:last])

    def withdraw(self, seq_id: int) -> None:
        """What was announced of a sequence is not computed after all."""
        self._under_way.forget(seq_id)

    def register(self, sequence: Sequence, num_full: int) -> None:
        """The first so many blocks are computed: they become findable."""
        done = self._num_registered[sequence.seq_id]
        if num_full <= done:
            return
        extend_hashes_of(sequence, num_full, self._block_size)
        hashes = sequence.block_hashes
        for group_id, table in enumerate(sequence.block_ids):
            new = [
                index
                for index in range(done, num_full)
                if table[index] != NULL_BLOCK and self._pool.register(table[index], group_id, hashes[index])
            ]
            if self._pool.events is not None and group_id == self.events.group_id:
                self.events.stored(sequence, new)
        self._under_way.end(sequence.seq_id, hashes[done:num_full])
        if self.computed is not None:
            self.computed.append((sequence, hashes[done:num_full]))
        self._num_registered[sequence.seq_id] = num_full

    def forget(self, sequence: Sequence) -> None:
        """Makes what a sequence computed or found unfindable; see `KVCacheManager.forget_content`."""
        num_full = sequence.num_computed_tokens // self._block_size
        extend_hashes_of(sequence, num_full, self._block_size)
        for content in sequence.block_hashes[:num_full]:
            for group in self._layout.groups:
                self._pool.forget(group.group_id, content)
        self._under_way.forget(sequence.seq_id)
        if self._num_registered.get(sequence.seq_id, _NEVER) != _NEVER:
            self._num_registered[sequence.seq_id] = 0
            sequence.commit_at = 0

    def reset(self) -> PrefixCacheReset:
        """Forgets all; what sequences with blocks have and will compute is never found."""
        for seq_id in self._num_registered:
            self._num_registered[seq_id] = _NEVER
        self._under_way.clear()
        return self._pool.reset_prefix_cache()

    def may_search(self, request: Sequence) -> bool:
        """Whether the request may find blocks that others computed."""
        # The log probabilities of a prompt come from computing it: a cached part would have none.
        # So do the states that a pooler reads.
        return self.is_on and request.sampling.prompt_logprobs is None and not request.needs_every_state


def find_cached_prefix(layout: KVLayout, pool: BlockPool, sequence: Sequence) -> list[list[int]]:
    """Block tables, one per group and of equal length, of the longest cached prefix of full blocks.

    At least one known token is left over. Full-attention groups need every block; window groups only those that the
    next query sees, and have the null block before them.
    """
    most = (sequence.num_tokens - 1) // layout.block_size
    tables = [_cached_run(layout, pool, sequence, group, most) for group in layout.groups if group.window is None]
    most = min(map(len, tables), default=most)
    extend_hashes_of(sequence, most, layout.block_size)
    windowed = [group for group in layout.groups if group.window is not None]
    found = [[pool.find(group.group_id, content) for content in sequence.block_hashes[:most]] for group in windowed]
    length = _longest_valid(windowed, found, most, layout.block_size)
    result: list[list[int]] = []
    for group in layout.groups:
        blocks = found.pop(0)[:length] if group.window is not None else tables.pop(0)[:length]
        num_dead = first_live_block(group, length * layout.block_size, layout.block_size)
        result.append([NULL_BLOCK] * num_dead + blocks[num_dead:])
    return result


def extend_hashes_of(sequence: Sequence, num_blocks: int, block_size: int) -> None:
    """Makes `block_hashes` cover the first `num_blocks` blocks of the sequence, which must be full."""
    extend_block_hashes(
        sequence.block_hashes, sequence.token_ids, num_blocks, block_size, sequence.hash_seed, sequence.hash_ahead
    )


def _cached_run(layout: KVLayout, pool: BlockPool, sequence: Sequence, group: KVGroup, most: int) -> list[int]:
    """Leading cached blocks of one group, hashing no further than the first miss."""
    blocks: list[int] = []
    hashes = sequence.block_hashes
    for index in range(most):
        if index == len(hashes):
            extend_hashes_of(sequence, index + 1, layout.block_size)
        block = pool.find(group.group_id, hashes[index])
        if block == NULL_BLOCK:
            break
        blocks.append(block)
    return blocks


def _longest_valid(groups: list[KVGroup], found: list[list[int]], most: int, block_size: int) -> int:
    """The largest length, in blocks, at which each window group has all blocks inside its window."""
    runs = [0] * len(groups)
    longest = 0
    for length in range(1, most + 1):
        valid = True
        for i, group in enumerate(groups):
            runs[i] = runs[i] + 1 if found[i][length - 1] != NULL_BLOCK else 0
            valid = valid and runs[i] >= length - first_live_block(group, length * block_size, block_size)
        if valid:
            longest = length
    return longest
