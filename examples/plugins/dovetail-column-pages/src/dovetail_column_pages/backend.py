"""The backend: pages, writes and products."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from dovetail.contracts.attention import (
    AttentionBatch,
    AttentionCapabilities,
    AttentionLayer,
    AttentionSetup,
    MovesSlots,
)
from dovetail.contracts.plugin import PluginOptions
from dovetail_column_pages.plan import Call, Planner

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


class ColumnPagesOptions(PluginOptions):
    """Options of `column_pages`."""

    gather_kib: int = Field(default=4096, ge=1)
    """KiB of pages that requests gather in one call. A request that needs more has a call of its own."""


class ColumnPages(MovesSlots):
    """Holds keys by columns, and both keys and values head by head.

    A page is [2, num_kv_heads, head_size * block_size] elements: the keys of each head, [head_size, block_size], then
    the values of each, [block_size, head_size]. So the page's matrices are the right factors of both products of
    attention, q K and w V, as they lie, and what all keys have in one dimension lies side by side, as vectors over keys
    want it.

    All requests with equally many query tokens go together: their pages are gathered at once, and two products per call
    serve every head of every request. The math is in float32 (float64 for float64).
    """

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = ColumnPagesOptions
    stability = "experimental"
    capabilities = AttentionCapabilities(
        device_types=frozenset({"cpu"}),
        dtypes=FLOATS,
        kv_dtypes=FLOATS,
        sliding_window=True,
        soft_cap=True,
        alibi=True,
        trees=True,
        sinks=True,
        chunked=True,
    )

    def __init__(self, options: ColumnPagesOptions, setup: AttentionSetup):
        super().__init__(options, setup)
        max_pages = max(1, options.gather_kib * 1024 // setup.spec.page_bytes(setup.block_size))
        self._planners = {reach: Planner(reach, setup, max_pages) for reach in {one.reach for one in setup.layers}}
        self._calls = {reach: list[Call]() for reach in self._planners}
        self._slots = torch.empty(0, dtype=torch.int64)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, 2 (keys, values), num_kv_heads, head_size * block_size]."""
        spec = self.setup.spec
        return (num_blocks, 2, spec.num_kv_heads, spec.head_size * self.setup.block_size)

    def plan(self, batch: AttentionBatch) -> None:
        """Groups the query tokens into calls, once for all layers that see equally far."""
        self._slots = torch.from_numpy(batch.slot_mapping.copy())
        self._calls = {reach: planner.plan(batch) for reach, planner in self._planners.items()}

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Writes all keys and values, then makes the planned calls."""
        self._write(kv_cache, self._slots, key, value)
        output = query.new_empty(query.shape)
        for call in self._calls[layer.reach]:
            output[call.rows] = self._attend(layer, call, query[call.rows], kv_cache).to(query.dtype)
        return output

    def move_slots(self, kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies keys and values of single tokens; both are read, which copies them, before either is written."""
        keys, values = self._matrices(kv_cache)
        page, offset = source // self.setup.block_size, source % self.setup.block_size
        self._write(kv_cache, target, keys[page, :, :, offset], values[page, :, offset])

    def _matrices(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., 2, num_kv_heads, head_size * block_size] -> keys [..., num_kv_heads, head_size, block_size] and values
        [..., num_kv_heads, block_size, head_size], views, whatever lies between pages."""
        head_size, block_size = self.setup.spec.head_size, self.setup.block_size
        keys, values = pages.unbind(-3)
        return keys.unflatten(-1, (head_size, block_size)), values.unflatten(-1, (block_size, head_size))

    def _write(self, kv_cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """key and value [n, num_kv_heads, head_size] go to these slots."""
        keys, values = self._matrices(kv_cache)
        page, offset = slots // self.setup.block_size, slots % self.setup.block_size
        keys[page, :, :, offset] = key.to(kv_cache.dtype)
        values[page, :, offset] = value.to(kv_cache.dtype)

    def _gather(self, call: Call, kv_cache: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """[requests, num_kv_heads, head_size, slots] and [requests, num_kv_heads, slots, head_size] in `dtype`."""
        num_requests, num_pages = call.pages.shape
        gathered = kv_cache.index_select(0, call.pages.flatten())
        keys, values = self._matrices(gathered.unflatten(0, (num_requests, num_pages)))
        keys = keys.permute(0, 2, 3, 1, 4).flatten(3).to(dtype)
        values = values.transpose(1, 2).flatten(2, 3).to(dtype)
        if call.unwritten is not None:
            values = values.masked_fill(call.unwritten[:, None, :, None], 0)
        return keys, values

    def _attend(self, layer: AttentionLayer, call: Call, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        """query [requests, queries, num_heads, head_size] -> the same shape, in float32 or float64."""
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        keys, values = self._gather(call, kv_cache, dtype)
        num_queries, heads = query.shape[1], (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads)
        # Heads that share a key head are rows of one matrix: [requests, num_kv_heads, group * queries, head_size].
        by_kv_head = query.to(dtype).unflatten(2, heads).permute(0, 2, 3, 1, 4).flatten(2, 3)
        scores = (by_kv_head @ keys).mul_(layer.scale).unflatten(2, (-1, num_queries))
        weights = _softmax(layer, call, scores, heads).flatten(2, 3)
        attended = (weights @ values).unflatten(2, (-1, num_queries))
        return attended.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _softmax(layer: AttentionLayer, call: Call, scores: torch.Tensor, heads: tuple[int, int]) -> torch.Tensor:
    """Scaled scores [requests, num_kv_heads, group, queries, slots], which are given up -> weights."""
    if layer.soft_cap is not None:
        scores.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
    if layer.alibi_slopes is not None:
        slopes = torch.tensor(layer.alibi_slopes, dtype=scores.dtype).view(*heads, 1, 1)
        scores.addcmul_(slopes, call.distances[:, None, None].to(scores.dtype))
    if call.hidden is not None:
        scores.masked_fill_(call.hidden[:, None, None], -torch.inf)
    if layer.sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = layer.sinks.to(scores.dtype).view(*heads, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]
