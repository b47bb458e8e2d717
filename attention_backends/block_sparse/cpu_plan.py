"""The step plan of `block_sparse` on CPUs: calls over equally many query tokens, each with the pages that it gathers.

Units (see units.py) of one length go through the same call, padded to the one that sees most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.attention_backends.block_sparse.pattern import BlockLists, VisibleBlocks
from dovetail.attention_backends.block_sparse.units import Units, create_units
from dovetail.contracts.attention import AttentionBatch


@dataclass(frozen=True)
class Call:
    """n units of `count` query tokens each."""

    rows: slice | torch.Tensor
    """Their tokens in the step, unit by unit."""
    num_units: int
    count: int
    pages: torch.Tensor
    """int64 [n, num_kv_heads, pages]: what each key head gathers; repeated pages are masked."""
    mask: torch.Tensor
    """[n, 1 or num_kv_heads, count * (1 or group), keys], 0 or -inf; rows of a key head are query heads by token."""
    unseen: torch.Tensor
    """int64: which of the gathered [n, num_kv_heads, keys] no row of their unit sees. What a former owner of the page
    has left there may be NaN, which a weight of 0 does not keep out."""


class CPUPlanner:
    """Makes the calls of one kind of layer."""

    def __init__(self, visible: VisibleBlocks, block_size: int, dtype: torch.dtype, budget_tokens: int):
        self._visible = visible
        self._block_size = block_size
        self._dtype = dtype
        self._budget_tokens = budget_tokens

    def plan(self, batch: AttentionBatch) -> list[Call]:
        """The calls of a step."""
        sparse_block = self._visible.pattern.block_size
        units = create_units(batch, sparse_block)
        lists = self._visible.lists(units.position // sparse_block)
        num_blocks = lists.counts.max(axis=1)
        calls = []
        for count in map(int, np.unique(units.count)):
            chosen = np.flatnonzero(units.count == count)
            order = chosen[np.argsort(-num_blocks[chosen], kind="stable")]
            calls += [self._call(batch, units, lists, part) for part in self._parts(order, num_blocks, sparse_block)]
        return calls

    def _parts(self, order: np.ndarray, num_blocks: np.ndarray, sparse_block: int) -> Iterator[np.ndarray]:
        """Units of one call: at most `budget_tokens` keys are gathered, and few more than are needed."""
        start = 0
        while start < len(order):
            most = int(num_blocks[order[start]])
            stop = min(len(order), start + max(1, self._budget_tokens // (most * sparse_block)))
            needed = num_blocks[order[start:stop]]
            # Padding of more than a quarter costs more than another call.
            stop = start + int(np.searchsorted(-needed, -0.75 * most, side="right"))
            yield order[start:stop]
            start = stop

    def _call(self, batch: AttentionBatch, units: Units, lists: BlockLists, chosen: np.ndarray) -> Call:
        count = int(units.count[chosen[0]])
        request, position = units.request[chosen], units.position[chosen]
        blocks = lists.padded(chosen)
        rows = (units.first_token[chosen][:, None] + np.arange(count)).reshape(-1)
        is_range = bool((np.diff(rows) == 1).all())
        pages = self._pages(batch, request, position + count, blocks)
        every_head = np.broadcast_to(pages, (len(chosen), self._visible.num_kv_heads, pages.shape[2]))
        hidden = torch.from_numpy(self._hidden(position, count, blocks))
        unseen = hidden.all(dim=2).expand(-1, self._visible.num_kv_heads, -1)
        return Call(
            slice(int(rows[0]), int(rows[-1]) + 1) if is_range else torch.from_numpy(rows),
            len(chosen),
            count,
            torch.from_numpy(every_head.copy()),
            torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf),
            unseen.reshape(-1).nonzero()[:, 0],
        )

    def _pages(self, batch: AttentionBatch, request: np.ndarray, end_key: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """int64 [n, 1 or num_kv_heads, pages]"""
        per_block = self._visible.pattern.block_size // self._block_size
        columns = (blocks[..., None] * per_block + np.arange(per_block)).reshape(*blocks.shape[:2], -1)
        # What lies behind the sequence, or behind the last block, is the last page again, and masked.
        last = ((end_key - 1) // self._block_size)[:, None, None]
        columns = np.where((columns < 0) | (columns > last), last, columns)
        return batch.block_table[request[:, None, None], columns].astype(np.int64)

    def _hidden(self, position: np.ndarray, count: int, blocks: np.ndarray) -> np.ndarray:
        """bool [n, heads, rows, keys]: what `Call.mask` hides."""
        size = self._visible.pattern.block_size
        keys = np.where(blocks[..., None] < 0, np.iinfo(np.int64).max, blocks[..., None] * size + np.arange(size))
        keys = keys.reshape(*blocks.shape[:2], 1, -1)
        tokens = position[:, None, None, None] + np.arange(count)[:, None]
        hidden = keys > tokens  # [n, heads, count, keys]
        group = len(self._visible.shifts) // self._visible.num_kv_heads
        if self._visible.is_uniform:
            return hidden if count == 1 else np.repeat(hidden, group, axis=2)
        query_block = (position // size)[:, None, None]
        by_head = np.stack(
            [
                [
                    ~self._visible.pattern.sees(query_block[:, 0], blocks[:, min(head, blocks.shape[1] - 1)], shift)
                    for shift in shifts
                ]
                for head, shifts in enumerate(self._visible.group_shifts)
            ]
        )  # [num_kv_heads, group, n, blocks]
        unseen = np.repeat(by_head.transpose(2, 0, 1, 3), size, axis=3)[:, :, None]
        return (hidden[:, :, :, None, :] | unseen).reshape(len(position), len(by_head), count * group, -1)
