"""Which blocks of keys the queries of a block see: local, strided and sink blocks, for all heads alike or shifted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from pydantic import Field

from dovetail.contracts.attention import AttentionLayer
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import PluginOptions


class BlockSparseOptions(PluginOptions):
    """Options of the `block_sparse` backend. It computes something else than full attention, so `auto` never takes it:
    name it, and the pattern that the model was trained with."""

    local_blocks: int | None = Field(default=None, ge=1)
    """Key blocks, up to the query's own, that every query sees. Must be given."""
    vert_stride: int | None = Field(default=None, ge=1)
    """Every vert_stride-th key block is seen by all later queries; null: none."""
    sink_blocks: int = Field(default=0, ge=0)
    """First key blocks, which every query sees."""
    sparse_block_size: int = Field(default=64, ge=1)
    """Tokens of a block of the pattern; a multiple of cache.block_size."""
    heads: Literal["same", "sliding", "sliding_groups"] = "same"
    """Whether strided blocks are the same for all heads (vLLM's homo_head), shift from query head to query head, or
    from key head to key head (homo_head_group)."""


@dataclass(frozen=True)
class BlockPattern:
    """Queries of block q see key block k <= q where q - k < local_blocks, k < sink_blocks, or
    (k + shift + 1) % vert_stride == 0; within the blocks, attention is causal. vert_stride 0: no strided blocks."""

    block_size: int
    local_blocks: int
    vert_stride: int
    sink_blocks: int

    @classmethod
    def of(cls, options: BlockSparseOptions) -> BlockPattern:
        """Raises `ConfigError` where the options name no pattern."""
        if options.local_blocks is None:
            raise ConfigError(NO_PATTERN)
        return cls(options.sparse_block_size, options.local_blocks, options.vert_stride or 0, options.sink_blocks)

    def visible(self, query_block: int, shift: int = 0) -> np.ndarray:
        """int64, ascending: the key blocks that queries of `query_block` see. Costs their number, not query_block."""
        end = query_block + 1
        parts = [np.arange(min(self.sink_blocks, end)), np.arange(max(0, end - self.local_blocks), end)]
        if self.vert_stride:
            parts.append(np.arange((-shift - 1) % self.vert_stride, end, self.vert_stride))
        return np.unique(np.concatenate(parts))

    def sees(self, query_blocks: np.ndarray, key_blocks: np.ndarray, shift: int) -> np.ndarray:
        """bool: whether queries see keys, for blocks that broadcast and of which no key block is after the query's."""
        seen = (query_blocks - key_blocks < self.local_blocks) | (key_blocks < self.sink_blocks)
        if self.vert_stride:
            seen |= (key_blocks + shift + 1) % self.vert_stride == 0
        return seen


NO_PATTERN = (
    "block_sparse reads only a part of the keys, so it needs to be told which: set attention.local_blocks, and "
    "vert_stride and sink_blocks where the model has them."
)


def head_shifts(layer: AttentionLayer, options: BlockSparseOptions) -> tuple[int, ...]:
    """By how many blocks the strided blocks of each query head are shifted.

    Heads are counted over all ranks, so that the pattern does not depend on how the layer is split.
    """
    if options.heads == "same" or not options.vert_stride:
        return (0,) * layer.num_heads
    total = layer.total_heads or layer.num_heads
    index = layer.first_head + np.arange(layer.num_heads)
    if options.heads == "sliding_groups":
        group = layer.num_heads // layer.num_kv_heads
        index, total = index // group, total // group
    step = max(1, options.vert_stride // total)
    return tuple(int(shift) for shift in index * step)


@dataclass
class VisibleBlocks:
    """The lists of `BlockPattern.visible` for the key heads of one layer kind, kept once they were made."""

    pattern: BlockPattern
    shifts: tuple[int, ...]
    num_kv_heads: int
    _lists: dict[int, tuple[np.ndarray, ...]] = field(default_factory=dict)

    @property
    def is_same(self) -> bool:
        """All key heads see the same blocks."""
        return len({tuple(sorted(set(shifts))) for shifts in self.group_shifts}) == 1

    @property
    def is_uniform(self) -> bool:
        """The query heads of a key head see the same blocks."""
        return all(len(set(shifts)) == 1 for shifts in self.group_shifts)

    @property
    def group_shifts(self) -> list[tuple[int, ...]]:
        """The shifts of the query heads of each key head."""
        group = len(self.shifts) // self.num_kv_heads
        return [self.shifts[head * group : (head + 1) * group] for head in range(self.num_kv_heads)]

    def lists(self, query_block: int) -> tuple[np.ndarray, ...]:
        """For each key head (one for all where they are the same): the blocks that some query head of it sees."""
        found = self._lists.get(query_block)
        if found is None:
            groups = self.group_shifts[:1] if self.is_same else self.group_shifts
            found = tuple(self._union(query_block, shifts) for shifts in groups)
            self._lists[query_block] = found
        return found

    def _union(self, query_block: int, shifts: tuple[int, ...]) -> np.ndarray:
        lists = [self.pattern.visible(query_block, shift) for shift in sorted(set(shifts))]
        return lists[0] if len(lists) == 1 else np.unique(np.concatenate(lists))
