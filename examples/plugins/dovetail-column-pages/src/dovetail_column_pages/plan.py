"""The plan of a step: which query tokens share a call, which pages it gathers, and which keys it hides.

Requests with few query tokens (decode, verify, the tail of a prompt) share calls with others that have as many. Those
with many are cut into tiles, each a call of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.contracts.attention import AttentionBatch, AttentionSetup, Reach

MAX_SHORT = 16
"""Most query tokens of a request that shares its calls."""
MAX_TILE = 128
"""Most query tokens of a tile."""
MAX_SCORES = 2**22
"""Scores that a tile has at most, unless one query token has more."""


@dataclass(frozen=True)
class Call:
    """Query tokens of requests that have equally many, and the pages that they see."""

    rows: torch.Tensor
    """int64 [requests, queries]: rows of the step."""
    pages: torch.Tensor
    """int64 [requests, pages]. Requests that need fewer repeat their last one."""
    hidden: torch.Tensor | None
    """bool [requests, queries, pages * block_size]: keys that a query does not see. None: every query sees all."""
    distances: torch.Tensor
    """float32 [requests, queries, pages * block_size]: position of the key less that of the query, for ALiBi. Empty
    where no layer asks."""
    unwritten: torch.Tensor | None
    """bool [requests, pages * block_size]: slots behind the end of a request. A former owner of the page may have left
    NaN there, which a weight of 0 does not keep out. None: there are none."""


@dataclass(frozen=True)
class _Part:
    """Requests with equally many query tokens, or one tile of a request."""

    requests: np.ndarray
    """[n]: their indices in the batch."""
    first: np.ndarray
    """[n]: slots of their first query token, in their sequence."""
    rows: np.ndarray
    """[n]: rows of their first query token, in the step."""
    num_queries: int
    first_blocks: np.ndarray
    """[n]: the first column of the block table that is read, and the one behind the last."""
    end_blocks: np.ndarray


class Planner:
    """Plans the calls of all layers with one reach."""

    def __init__(self, reach: Reach, setup: AttentionSetup, max_pages: int):
        self._reach = reach
        self._block_size = setup.block_size
        self._num_heads = max(layer.num_heads for layer in setup.layers)
        self._has_alibi = any(layer.alibi_slopes is not None for layer in setup.layers)
        self._max_pages = max_pages

    def plan(self, batch: AttentionBatch) -> list[Call]:
        """The calls for a batch; what they need of it is copied."""
        query_lens = np.diff(batch.query_start)
        # A tree's mask is over all of its tokens, so it is never cut.
        is_short = query_lens <= MAX_SHORT
        is_short[list(batch.tree_masks)] = True
        parts: list[_Part] = []
        for query_len in np.unique(query_lens[is_short]):
            parts += self._shared(batch, np.flatnonzero(is_short & (query_lens == query_len)), int(query_len))
        for request in np.flatnonzero(~is_short):
            parts += self._tiles(batch, int(request), int(query_lens[request]))
        return [self._call(batch, part) for part in parts]

    def _part(self, batch: AttentionBatch, requests: np.ndarray, skipped: int, num_queries: int) -> _Part:
        """`num_queries` query tokens of each request, after its first `skipped` ones."""
        starts = batch.query_start[requests].astype(np.int64)
        first = batch.seq_lens[requests].astype(np.int64) - (batch.query_start[requests + 1] - starts) + skipped
        first_blocks = self._reach.first_keys(first) // self._block_size
        end_blocks = -(-(first + num_queries) // self._block_size)
        return _Part(requests, first, starts + skipped, num_queries, first_blocks, end_blocks)

    def _shared(self, batch: AttentionBatch, requests: np.ndarray, query_len: int) -> Iterator[_Part]:
        """Sorted by their pages: in one call none has less than half as many as another, and together, padded, they
        have at most `max_pages`."""
        whole = self._part(batch, requests, 0, query_len)
        num_pages = whole.end_blocks - whole.first_blocks
        order = np.argsort(-num_pages, kind="stable")
        start = 0
        while start < len(order):
            most = int(num_pages[order[start]])
            fits = num_pages[order[start : start + max(1, self._max_pages // most)]] * 2 >= most
            end = start + int(fits.sum())
            yield self._part(batch, requests[order[start:end]], 0, query_len)
            start = end

    def _tiles(self, batch: AttentionBatch, request: int, query_len: int) -> Iterator[_Part]:
        most = MAX_SCORES // (self._num_heads * int(batch.seq_lens[request]))
        size = min(MAX_TILE, max(1, most))
        for skipped in range(0, query_len, size):
            yield self._part(batch, np.array([request]), skipped, min(size, query_len - skipped))

    def _call(self, batch: AttentionBatch, part: _Part) -> Call:
        num_pages = part.end_blocks - part.first_blocks
        columns = part.first_blocks[:, None] + np.minimum(np.arange(num_pages.max()), num_pages[:, None] - 1)
        slots = part.first_blocks[:, None] * self._block_size + np.arange(columns.shape[1] * self._block_size)
        query_slots = part.first[:, None] + np.arange(part.num_queries)
        seen = slots[:, None, :] <= query_slots[:, :, None]
        # The position of a tree's token is the one that it has if its path is accepted: its depth, not its slot.
        key_positions, query_positions = slots.copy(), query_slots.copy()
        for index, request in enumerate(part.requests):
            if (tree := batch.tree_masks.get(int(request))) is not None:
                own = slice(int(part.first[index] - slots[index, 0]), None)
                seen[index, :, own] = False
                seen[index, :, own][:, : part.num_queries] = tree
                query_positions[index] = part.first[index] + tree.sum(axis=1) - 1
                key_positions[index, own][: part.num_queries] = query_positions[index]
        seen &= key_positions[:, None, :] >= self._reach.first_keys(query_positions)[:, :, None]
        unwritten = slots >= batch.seq_lens[part.requests][:, None]
        distances = key_positions[:, None, :] - query_positions[:, :, None] if self._has_alibi else np.empty(0)
        return Call(
            rows=torch.from_numpy(part.rows[:, None] + np.arange(part.num_queries)),
            pages=torch.from_numpy(batch.block_table[part.requests[:, None], columns].astype(np.int64)),
            hidden=None if seen.all() else torch.from_numpy(~seen),
            distances=torch.from_numpy(distances.astype(np.float32)),
            unwritten=torch.from_numpy(unwritten) if unwritten.any() else None,
        )
