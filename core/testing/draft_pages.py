"""Pages and attention for one drafter without an engine: what `DraftSetup` promises, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch

from dovetail.contracts.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionLayer,
    AttentionSetup,
)
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import DraftPages
from dovetail.nn import Attention

BLOCK_SIZE = 4
_BLOCKS_PER_REQUEST = 64
_MAX_REQUESTS = 16


class PlainAttention(AttentionBackend):
    """One query token at a time, over keys gathered from the pages."""

    contract = (1, 1)
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        device_types=frozenset({"cpu"}), dtypes=frozenset({"float32"}), sliding_window=True, soft_cap=True, trees=True
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
            slots = slots if layer.window is None else slots[positions > own - layer.window]
            keys, values = flat[slots].unbind(1)
            grouped = row.view(layer.num_kv_heads, group, layer.head_size)
            scores = torch.einsum("hgd,nhd->hgn", grouped, keys).mul(layer.scale)
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            weights = scores.softmax(-1)
            rows.append(torch.einsum("hgn,nhd->hgd", weights, values).reshape(layer.num_heads, layer.head_size))
        return torch.stack(rows)


class SuitePages(DraftPages):
    """Pages of up to 16 requests; their blocks lie neither side by side nor in order."""

    def __init__(self) -> None:
        num_blocks = _MAX_REQUESTS * _BLOCKS_PER_REQUEST
        blocks = np.random.default_rng(0).permutation(np.arange(1, num_blocks + 1, dtype=np.int32))
        self._tables = blocks.reshape(_MAX_REQUESTS, _BLOCKS_PER_REQUEST)
        self._rows: dict[int, int] = {}
        self._backends: list[PlainAttention] = []

    def bind(self, layers: Sequence[Attention]) -> None:
        """Gives the layers of a drafter a backend and pages."""
        kinds: dict[KVSpec, list[Attention]] = {}
        for layer in layers:
            kinds.setdefault(layer.cache, []).append(layer)
        for spec, members in kinds.items():
            setup = AttentionSetup(
                tuple(layer.layer for layer in members), spec, BLOCK_SIZE, "float32", "cpu", _MAX_REQUESTS, 4096, 256
            )
            backend = PlainAttention(PluginOptions(), setup)
            self._backends.append(backend)
            for layer in members:
                layer.bind(backend, torch.zeros(backend.kv_cache_shape(self._tables.size + 1)))

    def plan(
        self,
        keys: Sequence[int],
        starts: np.ndarray,
        counts: np.ndarray,
        tree_masks: Mapping[int, np.ndarray] | None = None,
    ) -> np.ndarray:
        """As `DraftPages.plan`."""
        assert len(keys) == len(starts) == len(counts), "keys, starts and counts of different lengths"
        assert min(counts) >= 1, "a request without query tokens"
        rows = [self._rows.setdefault(key, len(self._rows)) for key in keys]
        slots = np.concatenate([start + np.arange(count) for start, count in zip(starts, counts, strict=True)])
        table = self._tables[rows]
        blocks = np.repeat(table, counts, axis=0)[np.arange(len(slots)), slots // BLOCK_SIZE].astype(np.int64)
        batch = AttentionBatch(
            query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            seq_lens=(np.asarray(starts) + counts).astype(np.int32),
            block_table=table,
            slot_mapping=blocks * BLOCK_SIZE + slots % BLOCK_SIZE,
            max_query_len=int(max(counts)),
            max_seq_len=int((np.asarray(starts) + counts).max()),
            tree_masks=tree_masks or {},
        )
        for backend in self._backends:
            backend.plan(batch)
        return slots.astype(np.int64)
