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
        _, groups = _best(batch.block_table, limits, requests, candidates[same], 1, min_requests)
        found += [group for group in groups if group.num_blocks >= min_blocks]
    return found


def _best(
    table: np.ndarray, limits: np.ndarray, requests: np.ndarray, members: np.ndarray, begin: int, min_requests: int
) -> tuple[int, list[SharedPrefix]]:
    """The blocks whose reading is saved, and the groups among `members` (equal before block `begin`) that save most."""
    end = _first_difference(table, requests[members], begin, int(limits[members].min()))
    saved = (len(members) - 1) * end
    longer = members[limits[members] > end]
    if len(longer) < min_requests:
        return saved, [SharedPrefix(requests[members], end)]
    parts = [
        _best(table, limits, requests, longer[same], end + 1, min_requests)
        for same in _equal(table[requests[longer], end], min_requests)
    ]
    if sum(part[0] for part in parts) <= saved:
        return saved, [SharedPrefix(requests[members], end)]
    return sum(part[0] for part in parts), [group for part in parts for group in part[1]]


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
