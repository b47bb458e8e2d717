"""Attention with torch's scaled_dot_product_attention, made for CPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from dovetail.attention_backends.sdpa_plan import (
    Buffer,
    KindPlan,
    LayerKind,
    LongRequest,
    Planner,
    ShortCall,
    Tile,
    split_tokens,
    token_shape,
    writes_out_scores,
)
from dovetail.attention_backends.sdpa_shared import attend_shared
from dovetail.attention_backends.whole_sequences import EqualSequences, by_length
from dovetail.contracts.attention import (
    AttendsBothWays,
    AttendsLatents,
    AttentionBatch,
    AttentionCapabilities,
    AttentionLayer,
    AttentionSetup,
    MovesSlots,
)
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.contracts.plugin import PluginOptions

_WIDE_WRITE = 8
"""Tokens from which on it pays to move eight bytes at a time."""


class SDPAOptions(PluginOptions):
    """Options of the `sdpa` backend."""

    gather_kib: int = Field(default=2048, ge=1)
    """KiB of keys and values that one call gathers; best where it fits the second-level cache."""


class SDPABackend(MovesSlots, AttendsLatents, AttendsBothWays):
    """Gathers the pages of many requests at once and attends to them in few calls; pages that many requests have in
    common are read once.

    A page holds, token by token, keys then values of all heads, so the block table itself is the index of the
    gather and the slot mapping the index of the write. Query heads that share a key head are rows of one matrix,
    so keys are never repeated. Scores are float32 inside (float64 for float64).

    A latent vector is key and value in one: torch's function wants both of one size, so what it returns has as many
    elements as the vector, of which the last ones are cut off.
    """

    contract = (1, 2)
    preference: ClassVar[int] = 5
    Options = SDPAOptions
    capabilities = AttentionCapabilities(
        device_types=frozenset({"cpu"}),
        dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
        kv_dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
        sliding_window=True,
        soft_cap=True,
        alibi=True,
        trees=True,
        sinks=True,
        chunked=True,
        latents=True,
        bidirectional=True,
    )

    def __init__(self, options: SDPAOptions, setup: AttentionSetup):
        super().__init__(options, setup)
        spec = setup.spec
        if spec.dtype not in self.capabilities.dtypes:
            raise ConfigError(
                f"sdpa attention cannot keep keys and values in {spec.dtype}; set cache.dtype to one of "
                f"{', '.join(sorted(self.capabilities.dtypes))}."
            )
        kv_dtype: torch.dtype = getattr(torch, spec.dtype)
        self._token_shape = token_shape(setup)
        token_bytes = math.prod(self._token_shape) * DTYPE_BYTES[spec.dtype]
        budget_tokens = max(1, options.gather_kib * 1024 // token_bytes)
        kinds = {LayerKind.of(layer) for layer in setup.layers}
        self._kind_of_layer = {layer.layer_id: LayerKind.of(layer) for layer in setup.layers}
        self._planners = {kind: Planner(kind, setup, budget_tokens) for kind in kinds}
        self._plans: dict[int, KindPlan] = {}
        self._sequences: list[EqualSequences] = []
        """Of the step, where layers keep nothing."""
        self._gathered = Buffer(kv_dtype)
        self._slots = torch.empty(0, dtype=torch.int64)
        self._new_tokens = torch.empty(setup.max_num_batched_tokens, *self._token_shape, dtype=kv_dtype)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """[num_blocks, block_size, 2 (key, value), num_kv_heads, head_size]; of latent vectors 1 in place of 2."""
        return (num_blocks, self.setup.block_size, *self._token_shape)

    def plan(self, batch: AttentionBatch) -> None:
        """Groups the rows into calls and builds their indices and masks, once for each kind of layer."""
        if self.setup.keeps_nothing:
            self._sequences = by_length(batch.query_start, self.setup.device)
            return
        self._slots = torch.from_numpy(batch.slot_mapping.copy())
        plans = {kind: planner.plan(batch, self._gathered) for kind, planner in self._planners.items()}
        self._plans = {layer_id: plans[kind] for layer_id, kind in self._kind_of_layer.items()}

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Writes the new tokens, then runs the planned calls."""
        return self._attend(layer, query, self._write((key, value), kv_cache), kv_cache)

    def latent_forward(
        self, layer: AttentionLayer, query: torch.Tensor, latent: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """As `forward`, with the latent vectors as keys and values of one head."""
        assert self.setup.latent is not None
        attended = self._attend(layer, query, self._write((latent[:, None],), kv_cache), kv_cache)
        return attended[..., : self.setup.latent.latent_size]

    def both_ways_forward(
        self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """One call for all sequences of one length, so that no key is padding and no mask is read."""
        if len(self._sequences) == 1:
            return _attend_whole(layer, self._sequences[0], query, key, value)
        output = query.new_empty(query.shape)
        for sequences in self._sequences:
            rows = sequences.rows
            output[rows] = _attend_whole(layer, sequences, query[rows], key[rows], value[rows])
        return output

    def _attend(
        self, layer: AttentionLayer, query: torch.Tensor, new_tokens: torch.Tensor, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        plan = self._plans[layer.layer_id]
        if plan.is_one_short_call:
            return _attend_short(layer, plan.short_calls[0], query, kv_cache)
        output = query.new_empty(query.shape)
        for shared in plan.shared_calls:
            output[shared.rest.rows] = attend_shared(layer, shared, query[shared.rest.rows], kv_cache)
        for call in plan.short_calls:
            output[call.rows] = _attend_short(layer, call, query[call.rows], kv_cache)
        for request in plan.long_requests:
            _attend_long(layer, request, query, new_tokens, kv_cache, output)
        return output

    def move_slots(self, kv_cache: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies keys and values of single tokens; all sources are read first."""
        block_size = self.setup.block_size
        kv_cache[target // block_size, target % block_size] = kv_cache[source // block_size, source % block_size]

    def _write(self, parts: Sequence[torch.Tensor], kv_cache: torch.Tensor) -> torch.Tensor:
        """`parts`: [T, num_kv_heads, head_size] each. Returns what was written: [T, parts, num_kv_heads, head_size] in
        the cache's dtype."""
        num_tokens = len(parts[0])
        new_tokens = self._new_tokens[:num_tokens]
        torch.stack([part.to(kv_cache.dtype) for part in parts], dim=1, out=new_tokens)
        if kv_cache.is_contiguous():
            token_size = kv_cache.shape[2:].numel()
            target, source = kv_cache.view(-1, token_size), new_tokens.view(-1, token_size)
            if num_tokens >= _WIDE_WRITE and token_size * kv_cache.itemsize % 8 == 0:
                # index_copy_ costs per element, whatever the element's size.
                target, source = target.view(torch.int64), source.view(torch.int64)
            target.index_copy_(0, self._slots, source)
        else:
            block_size = self.setup.block_size
            kv_cache[self._slots // block_size, self._slots % block_size] = new_tokens
        return new_tokens


def _attend_short(layer: AttentionLayer, call: ShortCall, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
    """query [n * query_len, num_heads, head_size] -> the same shape."""
    keys, values = call.source.read(kv_cache)
    num_requests, query_len, num_kv_heads = call.num_requests, call.query_len, layer.num_kv_heads
    group = layer.num_heads // num_kv_heads
    # [n, num_kv_heads, query_len * group, head_size]: one matrix for each key head.
    if query_len == 1:
        matrices = query.view(num_requests, num_kv_heads, group, layer.head_size)
        return _attention(layer, matrices, keys, values, call.mask).reshape(query.shape)
    by_kv_head = query.view(num_requests, query_len, num_kv_heads, group, layer.head_size)
    attended = _attention(layer, by_kv_head.transpose(1, 2).flatten(2, 3), keys, values, call.mask)
    by_query = attended.view(num_requests, num_kv_heads, query_len, group, layer.head_size).transpose(1, 2)
    return by_query.reshape(query.shape)


def _attend_long(
    layer: AttentionLayer,
    request: LongRequest,
    query: torch.Tensor,
    new_tokens: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Fills the request's rows of `output`."""
    if request.fresh is None:
        keys, values = request.source.read(kv_cache)
    else:
        keys, values = split_tokens(new_tokens[None, request.fresh])
    for tile in request.tiles:
        tile_query = query[None, tile.rows].transpose(1, 2)
        attended = _attend_tile(layer, tile, tile_query, keys[:, :, tile.keys], values[:, :, tile.keys])
        output[tile.rows] = attended[0].transpose(0, 1)


def _attend_tile(
    layer: AttentionLayer, tile: Tile, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """query [1, num_heads, queries, head_size], keys and values [1, num_kv_heads, keys, head_size] -> like query."""
    if not writes_out_scores(layer):
        if layer.num_kv_heads == 1:
            # Not repeated in memory, as enable_gqa does it.
            keys, values = (tensor.expand(-1, layer.num_heads, -1, -1) for tensor in (keys, values))
        return F.scaled_dot_product_attention(
            query,
            keys.to(query.dtype),
            values.to(query.dtype),
            attn_mask=tile.mask,
            is_causal=tile.mask is None,
            scale=layer.scale,
            enable_gqa=True,
        )
    heads = (1, layer.num_kv_heads, layer.num_heads // layer.num_kv_heads)
    grouped = query.view(*heads, *query.shape[2:])
    mask = tile.mask
    if layer.alibi_slopes is not None and mask is not None:
        mask = mask.view(*heads, *mask.shape[2:])
    sinks = None if layer.sinks is None else layer.sinks.view(*heads, 1, 1)
    return _written_out(layer, grouped, keys.unsqueeze(2), values.unsqueeze(2), mask, sinks).flatten(1, 2)


def _attention(
    layer: AttentionLayer,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    if writes_out_scores(layer):
        return _written_out(layer, query, keys, values, mask, _sinks_of_rows(layer, query.shape[2]))
    keys, values = keys.to(query.dtype), values.to(query.dtype)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=layer.scale)


def _attend_whole(
    layer: AttentionLayer,
    sequences: EqualSequences,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """[n * length, heads, head_size] of n sequences -> the same shape."""
    query, key, value = (
        rows.view(sequences.count, sequences.length, *rows.shape[1:]).transpose(1, 2) for rows in (query, key, value)
    )
    is_grouped = layer.num_kv_heads != layer.num_heads
    attended = F.scaled_dot_product_attention(query, key, value, scale=layer.scale, enable_gqa=is_grouped)
    return attended.transpose(1, 2).flatten(0, 1)


def _sinks_of_rows(layer: AttentionLayer, num_rows: int) -> torch.Tensor | None:
    """[1, num_kv_heads, num_rows, 1] for rows that go through the heads of a group again and again."""
    if layer.sinks is None:
        return None
    of_group = layer.sinks.view(1, layer.num_kv_heads, -1, 1)
    return of_group.repeat(1, 1, num_rows // of_group.shape[2], 1)


def _written_out(
    layer: AttentionLayer,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention with the layer's soft cap and sinks (broadcast to [..., rows, 1]), which torch's own function
    has not; float32 inside."""
    math_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    cap = layer.soft_cap
    factor = layer.scale if cap is None else layer.scale / cap
    scores = (query.to(math_dtype) * factor) @ keys.to(math_dtype).transpose(-1, -2)
    if cap is not None:
        scores = scores.tanh_().mul_(cap)
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        # The sink has no value: it only takes its share of the weights.
        weights = torch.softmax(scores, dim=-1) * torch.sigmoid(scores.logsumexp(dim=-1, keepdim=True) - sinks)
    return (weights @ values.to(math_dtype)).to(query.dtype)
