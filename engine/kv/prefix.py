"""The longest prefix of a sequence whose pages exist already."""

from __future__ import annotations

from dovetail.contracts.kv import KVGroup, KVLayout
from dovetail.engine.kv.hashing import extend_block_hashes
from dovetail.engine.kv.pool import NULL_BLOCK, BlockPool
from dovetail.engine.sequence import Sequence


def first_live_block(group: KVGroup, num_computed_tokens: int, block_size: int) -> int:
    """Index of the first block that the query at position `num_computed_tokens`, or a later one, may see."""
    if group.window is None:
        return 0
    return max(0, num_computed_tokens - group.window + 1) // block_size


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


def find_fork_prefix(layout: KVLayout, sequence: Sequence) -> int:
    """Tokens that `sequence` can share with its living fork parent, a partly filled last block included."""
    parent = sequence.fork_parent
    if parent is None or not parent.block_ids:
        return 0
    if parent.hash_seed != sequence.hash_seed:
        return 0
    length = min(parent.num_computed_tokens, sequence.num_tokens - 1)
    ahead = sequence.hash_ahead
    length = max(0, _common_prefix(parent.token_ids, sequence.token_ids, length + ahead) - ahead)
    num_blocks = layout.blocks_for(length)
    for group, table in zip(layout.groups, parent.block_ids, strict=True):
        if NULL_BLOCK in table[first_live_block(group, length, layout.block_size) : num_blocks]:
            return 0
    return length


def _common_prefix(a: list[int], b: list[int], at_most: int) -> int:
    if a[:at_most] == b[:at_most]:
        return at_most
    return next(i for i in range(at_most) if a[i] != b[i])
