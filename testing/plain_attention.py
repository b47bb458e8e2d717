"""An attention backend written straight from the contract's words, one query token at a time: the oracle of the suites,
and of a plugin author's own tests. In float32, on the CPU, slow."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch

from dovetail.contracts.attention import (
    AttendsBothWays,
    AttendsLatents,
    AttentionBatch,
    AttentionCapabilities,
    AttentionLayer,
    AttentionSetup,
    MovesSlots,
)
from dovetail.contracts.plugin import PluginOptions


class PlainAttention(MovesSlots):
    """One query token at a time, over keys gathered from the pages."""

    contract = (1, 0)
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        device_types=frozenset({"cpu"}),
        dtypes=frozenset({"float32"}),
        sliding_window=True,
        soft_cap=True,
        alibi=True,
        trees=True,
        chunked=True,
    )

    def __init__(self, options: PluginOptions, setup: AttentionSetup):
        super().__init__(options, setup)
        self._slots = torch.empty(0, dtype=torch.int64)
        self._seen: list[tuple[torch.Tensor, int, torch.Tensor]] = []

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, block_size, 2, num_kv_heads, head_size]."""
        spec = self.setup.spec
        return (num_blocks, self.setup.block_size, 2, spec.num_kv_heads, spec.head_size)

    def plan(self, batch: AttentionBatch) -> None:
        """For each query token: the slots that it sees, its position and theirs."""
        self._slots = torch.from_numpy(batch.slot_mapping.copy())
        self._seen = []
        for index, length in enumerate(batch.seq_lens.tolist()):
            count = int(batch.query_start[index + 1] - batch.query_start[index])
            mask = batch.tree_masks.get(index, np.tril(np.ones((count, count), dtype=bool)))
            places = np.arange(length)
            size = self.setup.block_size
            slots = batch.block_table[index, places // size].astype(np.int64) * size + places % size
            positions = places.copy()
            positions[length - count :] = length - count + mask.sum(1) - 1
            for row in range(count):
                seen = np.concatenate([np.arange(length - count), length - count + np.flatnonzero(mask[row])])
                own = int(positions[length - count + row])
                self._seen.append((torch.from_numpy(slots[seen]), own, torch.from_numpy(positions[seen])))

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Writes, then attends row by row."""
        flat = kv_cache.view(-1, *kv_cache.shape[2:])
        flat[self._slots] = torch.stack((key, value), dim=1)
        group = layer.num_heads // layer.num_kv_heads
        rows = []
        for row, (slots, own, positions) in zip(query, self._seen, strict=True):
            is_seen = positions >= layer.reach.first_key(own)
            slots, positions = slots[is_seen], positions[is_seen]
            keys, values = flat[slots].unbind(1)
            grouped = row.view(layer.num_kv_heads, group, layer.head_size)
            scores = torch.einsum("hgd,nhd->hgn", grouped, keys).mul(layer.scale)
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            if layer.alibi_slopes is not None:
                slopes = torch.tensor(layer.alibi_slopes).view(layer.num_kv_heads, group, 1)
                scores = scores + slopes * (positions - own)
            weights = scores.softmax(-1)
            rows.append(torch.einsum("hgn,nhd->hgd", weights, values).reshape(layer.num_heads, layer.head_size))
        return torch.stack(rows)

    def move_slots(self, kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """All sources are read first."""
        flat = kv_cache.view(-1, *kv_cache.shape[2:])
        flat[target] = flat[source]


class PlainLatentAttention(PlainAttention, AttendsLatents):
    """`PlainAttention`, and attention to latent vectors."""

    contract = (1, 1)
    capabilities: ClassVar[AttentionCapabilities] = replace(PlainAttention.capabilities, latents=True)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """That of `PlainAttention`; of latent vectors [num_blocks, block_size, head_size]."""
        if self.setup.latent is None:
            return super().kv_cache_shape(num_blocks)
        return (num_blocks, self.setup.block_size, self.setup.spec.head_size)

    def latent_forward(
        self, layer: AttentionLayer, query: torch.Tensor, latent: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """Writes, then attends row by row."""
        assert self.setup.latent is not None
        flat = kv_cache.view(-1, kv_cache.shape[-1])
        flat[self._slots] = latent
        rows = []
        for row, (slots, _, _) in zip(query, self._seen, strict=True):
            weights = (row @ flat[slots].T * layer.scale).softmax(-1)
            rows.append(weights @ flat[slots, : self.setup.latent.latent_size])
        return torch.stack(rows)


class PlainBothWaysAttention(PlainLatentAttention, AttendsBothWays):
    """`PlainLatentAttention`, and attention of encoders."""

    contract = (1, 2)
    capabilities: ClassVar[AttentionCapabilities] = replace(PlainLatentAttention.capabilities, bidirectional=True)

    def __init__(self, options: PluginOptions, setup: AttentionSetup):
        super().__init__(options, setup)
        self._query_start: list[int] = []

    def plan(self, batch: AttentionBatch) -> None:
        """As `PlainAttention`; of layers that keep nothing, where each sequence begins."""
        if self.setup.keeps_nothing:
            self._query_start = batch.query_start.tolist()
        else:
            super().plan(batch)

    def both_ways_forward(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attends head by head, to the keys of the row's own sequence."""
        group, output = layer.num_heads // layer.num_kv_heads, torch.empty_like(query)
        for start, stop in pairwise(self._query_start):
            for head in range(layer.num_heads):
                keys, values = key[start:stop, head // group], value[start:stop, head // group]
                weights = (query[start:stop, head] @ keys.T * layer.scale).softmax(-1)
                output[start:stop, head] = weights @ values
        return output
