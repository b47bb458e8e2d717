"""Which blocks of keys the queries of a block see: local, strided and sink blocks, for all heads alike or shifted."""

from __future__ import annotations

import functools
from dataclasses import dataclass
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


@dataclass(frozen=True)
class BlockLists:
    """The key blocks that each of n query blocks sees, for each of h key heads: 1 where all of them see the same."""

    begins: np.ndarray
    """int64 [n, h]: where each list begins in `blocks`; equal query blocks share theirs."""
    counts: np.ndarray
    """int64 [n, h]"""
    blocks: np.ndarray
    """int64: ascending within a list"""

    def padded(self, chosen: np.ndarray) -> np.ndarray:
        """int64 [len(chosen), h, most]: the lists of the chosen query blocks, -1 behind the last."""
        begins, counts = self.begins[chosen][..., None], self.counts[chosen][..., None]
        places = np.arange(counts.max())
        return np.where(places < counts, self.blocks[np.minimum(begins + places, len(self.blocks) - 1)], -1)


@dataclass(frozen=True)
class VisibleBlocks:
    """What the key heads of one layer kind see: the blocks that some query head of theirs sees."""

    pattern: BlockPattern
    shifts: tuple[int, ...]
    num_kv_heads: int

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

    def lists(self, query_blocks: np.ndarray) -> BlockLists:
        """Of `query_blocks` [n]. Costs the lengths of the lists, however far the query blocks are.

        A list is the sinks, then the strided blocks between these and the local ones, then the local ones.
        """
        used, places = np.unique(query_blocks, return_inverse=True)
        end = used.astype(np.int64)[:, None] + 1
        local = np.maximum(end - self.pattern.local_blocks, 0)
        sinks = np.minimum(self.pattern.sink_blocks, local)
        first_strided = self._strided_before(sinks)
        num_strided = self._strided_before(local) - first_strided
        counts = sinks + num_strided + (end - local)
        begins = (np.cumsum(counts) - counts.reshape(-1)).reshape(counts.shape)
        # From here on one entry for each listed block.
        row, head = (np.repeat(index, counts.reshape(-1)) for index in np.indices(counts.shape).reshape(2, -1))
        block = np.arange(len(row)) - begins[row, head]
        behind_sinks = block - sinks[row, 0]
        behind_strided = behind_sinks - num_strided[row, head]
        strided = self._strided(first_strided[row, head] + behind_sinks, head)
        block = np.where(behind_sinks < 0, block, np.where(behind_strided < 0, strided, local[row, 0] + behind_strided))
        return BlockLists(begins[places], counts[places], block)

    @functools.cached_property
    def _remainders(self) -> tuple[np.ndarray, np.ndarray]:
        """[h, most]: what strided blocks leave when divided by vert_stride, ascending, padded with vert_stride, by key
        head; [h]: how many there are."""
        stride = self.pattern.vert_stride
        groups = self.group_shifts[:1] if self.is_same else self.group_shifts
        found = [sorted({(-shift - 1) % stride for shift in shifts}) for shifts in groups]
        counts = np.array([len(remainders) for remainders in found])
        padded = [remainders + [stride] * (int(counts.max()) - len(remainders)) for remainders in found]
        return np.array(padded), counts

    def _strided_before(self, bounds: np.ndarray) -> np.ndarray:
        """[n, h]: how many strided blocks each key head sees before the block in `bounds` [n, 1]."""
        if not self.pattern.vert_stride:
            return np.zeros((len(bounds), 1), dtype=np.int64)
        remainders, counts = self._remainders
        rounds, rest = np.divmod(bounds, self.pattern.vert_stride)
        return rounds * counts + (remainders < rest[..., None]).sum(axis=2)

    def _strided(self, rank: np.ndarray, head: np.ndarray) -> np.ndarray:
        """The strided block that a key head sees after `rank` others."""
        if not self.pattern.vert_stride:
            return rank
        remainders, counts = self._remainders
        rounds, index = np.divmod(rank, counts[head])
        return rounds * self.pattern.vert_stride + remainders[head, index]
