"""Attention in plain torch, one query token at a time: the oracle that other backends are measured against."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
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
    Reach,
)
from dovetail.contracts.plugin import PluginOptions


@dataclass(frozen=True)
class _Row:
    """One query token."""

    token: int
    """Its row in the step."""
    keys: slice | torch.Tensor
    """Which of the request's keys it sees, in ascending order."""
    position: int


@dataclass(frozen=True)
class _Request:
    """One request of the step under one reach, copied out of the host's buffers."""

    rows: list[_Row]
    pages: torch.Tensor
    """int64 [n]: page of each key that some row sees."""
    offsets: torch.Tensor
    """int64 [n]: its offset in the page."""
    positions: torch.Tensor
    """int64 [n]: its position in the sequence."""


class ReferenceBackend(MovesSlots, AttendsLatents, AttendsBothWays):
    """Gathers, for each query token, the keys that it sees, and writes out softmax(q K^T) V.

    The math is in float32 (float64 for float64). A row is computed by itself, over its visible keys only, so its
    bits depend neither on other rows nor on how its prompt was cut into chunks.
    """

    contract = (1, 2)
    preference: ClassVar[int] = -10
    stability = "stable"
    capabilities = AttentionCapabilities(
        device_types=frozenset({"cpu", "cuda", "mps", "xpu"}),
        dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
        kv_dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
        sliding_window=True,
        soft_cap=True,
        alibi=True,
        trees=True,
        sinks=True,
        chunked=True,
        batch_invariant=True,
        latents=True,
        bidirectional=True,
    )

    def __init__(self, options: PluginOptions, setup: AttentionSetup):
        super().__init__(options, setup)
        self._reaches = {layer.reach for layer in setup.layers}
        self._requests: dict[Reach, list[_Request]] = {}
        self._write_pages = torch.empty(0, dtype=torch.int64)
        self._write_offsets = torch.empty(0, dtype=torch.int64)
        self._query_start: list[int] = []

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, 2 (key, value), block_size, num_kv_heads, head_size]; of latent vectors [num_blocks, block_size,
        head_size]."""
        spec = self.setup.spec
        if self.setup.latent is not None:
            return (num_blocks, self.setup.block_size, spec.head_size)
        return (num_blocks, 2, self.setup.block_size, spec.num_kv_heads, spec.head_size)

    def plan(self, batch: AttentionBatch) -> None:
        """Copies block table and slots to the device, or where sequences begin, for layers that keep nothing."""
        if self.setup.keeps_nothing:
            self._query_start = batch.query_start.tolist()
            return
        self._write_pages, self._write_offsets = self._page_and_offset(batch.slot_mapping)
        self._requests = {
            reach: [self._request(batch, index, reach) for index in range(len(batch.seq_lens))]
            for reach in self._reaches
        }

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Writes all keys and values, then attends row by row."""
        kv_cache[self._write_pages, 0, self._write_offsets] = key.to(kv_cache.dtype)
        kv_cache[self._write_pages, 1, self._write_offsets] = value.to(kv_cache.dtype)
        output = query.new_empty(query.shape)
        for request in self._requests[layer.reach]:
            keys = kv_cache[request.pages, 0, request.offsets]
            self._attend_request(layer, request, query, keys, kv_cache[request.pages, 1, request.offsets], output)
        return output

    def latent_forward(
        self, layer: AttentionLayer, query: torch.Tensor, latent: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """Writes all latent vectors, then attends row by row: the vectors are the keys, their first part the values."""
        assert self.setup.latent is not None
        latent_size = self.setup.latent.latent_size
        kv_cache[self._write_pages, self._write_offsets] = latent.to(kv_cache.dtype)
        output = query.new_empty(*query.shape[:2], latent_size)
        for request in self._requests[layer.reach]:
            vectors = kv_cache[request.pages, request.offsets].unsqueeze(1)
            self._attend_request(layer, request, query, vectors, vectors[..., :latent_size], output)
        return output

    def both_ways_forward(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attends row by row to the keys of the row's own sequence."""
        output = query.new_empty(query.shape)
        for start, stop in itertools.pairwise(self._query_start):
            rows = [_Row(start + row, slice(0, stop - start), row) for row in range(stop - start)]
            nowhere = torch.empty(0, dtype=torch.int64)
            request = _Request(rows, nowhere, nowhere, torch.arange(stop - start))
            self._attend_request(layer, request, query, key[start:stop], value[start:stop], output)
        return output

    def move_slots(self, kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies keys and values of single tokens; all sources are read first."""
        block_size = self.setup.block_size
        by_token = kv_cache if self.setup.latent is not None else kv_cache.transpose(1, 2)
        by_token[target // block_size, target % block_size] = by_token[source // block_size, source % block_size]

    def _request(self, batch: AttentionBatch, index: int, reach: Reach) -> _Request:
        start, stop = int(batch.query_start[index]), int(batch.query_start[index + 1])
        num_cached = int(batch.seq_lens[index]) - (stop - start)
        tree = batch.tree_masks.get(index)
        positions = np.arange(batch.seq_lens[index])
        if tree is not None:
            # The position of a tree's token is the one that it has if its path is accepted: its depth, not its slot.
            positions[num_cached:] = num_cached + tree.sum(axis=1) - 1
        first = reach.first_key(num_cached)
        rows = [
            _Row(start + row, self._visible(positions, num_cached, row, tree, reach, first), int(position))
            for row, position in enumerate(positions[num_cached:])
        ]
        block_size = self.setup.block_size
        slot_positions = np.arange(first, len(positions))
        pages = batch.block_table[index, slot_positions // block_size].astype(np.int64)
        return _Request(
            rows,
            torch.tensor(pages, device=self.setup.device),
            torch.tensor(slot_positions % block_size, device=self.setup.device),
            torch.tensor(positions[first:], device=self.setup.device),
        )

    def _visible(
        self,
        positions: np.ndarray,
        num_cached: int,
        row: int,
        tree: np.ndarray | None,
        reach: Reach,
        first: int,
    ) -> slice | torch.Tensor:
        """Keys that query token `row` sees, counted from key `first`."""
        own = int(positions[num_cached + row])
        oldest = reach.first_key(own)
        if tree is None:
            return slice(oldest - first, own + 1 - first)
        seen = positions >= oldest
        seen[num_cached:] &= tree[row]
        return torch.tensor(np.flatnonzero(seen) - first, device=self.setup.device)

    def _page_and_offset(self, slots: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        block_size, device = self.setup.block_size, self.setup.device
        return torch.tensor(slots // block_size, device=device), torch.tensor(slots % block_size, device=device)

    def _attend_request(
        self,
        layer: AttentionLayer,
        request: _Request,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Keys and values [n, num_kv_heads, elements] of all positions that some row sees."""
        math_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        group = layer.num_heads // layer.num_kv_heads
        keys, values = (vectors.to(math_dtype).transpose(0, 1).contiguous() for vectors in (keys, values))
        for row in request.rows:
            q = query[row.token].to(math_dtype).view(layer.num_kv_heads, group, layer.head_size)
            scores = q @ keys[:, row.keys].transpose(1, 2) * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            if layer.alibi_slopes is not None:
                slopes = torch.tensor(layer.alibi_slopes).to(scores).view(layer.num_kv_heads, group, 1)
                scores = scores + slopes * (request.positions[row.keys] - row.position)
            if layer.sinks is None:
                weights = torch.softmax(scores, dim=-1)
            else:
                sink = layer.sinks.to(scores).view(layer.num_kv_heads, group, 1)
                weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
            attended = weights @ values[:, row.keys]
            output[row.token] = attended.reshape(output.shape[1:]).to(query.dtype)
