"""Requests of a step whose block tables begin alike: what they share can be read once for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.contracts.attention import AttentionBatch

_FIRST_COLUMNS = 16
"""Blocks that are compared first; four times as many each time that all of them are equal."""


@dataclass(frozen=True)
class SharedPrefix:
    """Requests behind one prefix."""

    members: np.ndarray
    """int64: their indices in the batch, ascending."""
    num_blocks: int
    """Leading blocks that all of them have, which lie before the query tokens of each."""


def shared_prefixes(
    batch: AttentionBatch, requests: np.ndarray, block_size: int, min_requests: int, min_keys: int
) -> list[SharedPrefix]:
    """Groups of `requests`, each in at most one, that share at least `min_keys` keys in whole blocks.

    A group is divided where the groups behind a longer prefix save more reading together than it does. Without common
    blocks this looks at one entry of each table.
    """
    query_lens = np.diff(batch.query_start)[requests]
    limits = (batch.seq_lens[requests] - query_lens) // block_size
    min_blocks = max(1, -(-min_keys // block_size))
    candidates = np.flatnonzero(limits >= min_blocks)
    found: list[SharedPrefix] = []
    for same in _equal(batch.block_table[requests[candidates], 0], min_requests):
        groups = _best(batch.block_table, limits, requests, candidates[same], min_requests)
        found += [group for group in groups if group.num_blocks >= min_blocks]
    return found


def _best(
    table: np.ndarray, limits: np.ndarray, requests: np.ndarray, members: np.ndarray, min_requests: int
) -> list[SharedPrefix]:
    """The groups among `members` (whose first blocks are equal) that save most reading. Without recursion: prefixes can
    be as deep in each other as there are requests."""
    found = [(members, -1)]
    ends: list[int] = []
    for index, (same, parent) in enumerate(found):  # grows on the way: parents before children
        begin = ends[parent] + 1 if parent >= 0 else 1
        ends.append(_first_difference(table, requests[same], begin, int(limits[same].min())))
        longer = same[limits[same] > ends[-1]]
        if len(longer) >= min_requests:
            found += [(longer[part], index) for part in _equal(table[requests[longer], ends[-1]], min_requests)]
    behind, groups = [0] * len(found), [list[SharedPrefix]() for _ in found]
    for index in reversed(range(len(found))):
        same, parent = found[index]
        saved = (len(same) - 1) * ends[index]
        if behind[index] <= saved:
            behind[index], groups[index] = saved, [SharedPrefix(requests[same], ends[index])]
        if parent >= 0:
            behind[parent] += behind[index]
            groups[parent] = groups[index] + groups[parent]
    return groups[0]


def _equal(blocks: np.ndarray, min_requests: int) -> list[np.ndarray]:
    """Places of equal blocks, where there are enough."""
    values, counts = np.unique(blocks, return_counts=True)
    return [np.flatnonzero(blocks == value) for value in values[counts >= min_requests]]


def _first_difference(table: np.ndarray, rows: np.ndarray, begin: int, end: int) -> int:
    """The first column from `begin` on in which `rows` of the table differ, or `end`."""
    size = _FIRST_COLUMNS
    while begin < end:
        columns = table[rows, begin : min(begin + size, end)]
        is_same = (columns == columns[0]).all(axis=0)
        if not is_same.all():
            return begin + int(is_same.argmin())
        begin, size = begin + columns.shape[1], 4 * size
    return end
