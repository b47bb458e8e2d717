"""Pages and attention for one drafter without an engine, as `LayerSetup` promises them, in plain torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dovetail.contracts.attention import (
    AttentionBatch,
    AttentionModule,
    AttentionSetup,
)
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import DraftPages
from dovetail.testing.plain_attention import PlainLatentAttention

BLOCK_SIZE = 4
_BLOCKS_PER_REQUEST = 64
_MAX_REQUESTS = 16


class SuitePages(DraftPages):
    """Pages of up to 16 requests; their blocks lie neither side by side nor in order."""

    def __init__(self) -> None:
        num_blocks = _MAX_REQUESTS * _BLOCKS_PER_REQUEST
        blocks = np.random.default_rng(0).permutation(np.arange(1, num_blocks + 1, dtype=np.int32))
        self._tables = blocks.reshape(_MAX_REQUESTS, _BLOCKS_PER_REQUEST)
        self._rows: dict[int, int] = {}
        self._backends: list[PlainLatentAttention] = []

    def bind(self, layers: Sequence[AttentionModule]) -> None:
        """Gives the layers of a drafter a backend and pages."""
        kinds: dict[KVSpec, list[AttentionModule]] = {}
        for layer in layers:
            kinds.setdefault(layer.cache, []).append(layer)
        for spec, members in kinds.items():
            setup = AttentionSetup(
                tuple(layer.layer for layer in members), spec, BLOCK_SIZE, "float32", "cpu", _MAX_REQUESTS, 4096, 256
            )
            backend = PlainLatentAttention(PluginOptions(), setup)
            self._backends.append(backend)
            for layer in members:
                layer.bind(backend, torch.zeros(backend.kv_cache_shape(self._tables.size + 1)))

    def plan(
        self,
        seq_ids: Sequence[int],
        starts: np.ndarray,
        counts: np.ndarray,
        tree_masks: Mapping[int, np.ndarray] | None = None,
    ) -> np.ndarray:
        assert len(seq_ids) == len(starts) == len(counts), "seq_ids, starts and counts of different lengths"
        assert min(counts) >= 1, "a request without query tokens"
        rows = [self._rows.setdefault(seq_id, len(self._rows)) for seq_id in seq_ids]
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
