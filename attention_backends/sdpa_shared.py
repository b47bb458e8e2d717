"""Requests whose block tables begin alike: their common pages are read once for all of them.

Attention over prefix and rest is computed apart and put together by the log-sum-exp of the scores, as in Hydragen
(Juravsky et al. 2024, section 3.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.contracts.attention import AttentionLayer

if TYPE_CHECKING:
    from dovetail.attention_backends.sdpa_plan import SharedCall

MIN_REQUESTS = 4
MIN_TOKENS = 128
"""Below these, another call costs more than it saves."""


def attend_shared(layer: AttentionLayer, call: SharedCall, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
    """query [n * query_len, num_heads, head_size] -> the same shape."""
    group = layer.num_heads // layer.num_kv_heads
    rest = call.rest
    grouped = query.view(-1, layer.num_kv_heads, group, layer.head_size)
    # One matrix of all requests' queries for each key head.
    stacked = grouped.transpose(0, 1).reshape(1, layer.num_kv_heads, -1, layer.head_size)
    out_prefix, lse_prefix = _attend(layer, stacked, call.prefix.read(kv_cache), None)
    own = grouped.view(rest.num_requests, rest.query_len, layer.num_kv_heads, group, layer.head_size)
    own = own.transpose(1, 2).flatten(2, 3)
    out_rest, lse_rest = _attend(layer, own, rest.source.read(kv_cache), rest.mask)
    # Both as [num_kv_heads, n, query_len * group, ...], which is how the stacked queries lie.
    shape = (layer.num_kv_heads, rest.num_requests, rest.query_len * group)
    share = torch.sigmoid(lse_prefix.view(shape) - lse_rest.transpose(0, 1)).unsqueeze(-1)
    merged = torch.lerp(out_rest.transpose(0, 1).float(), out_prefix.view(*shape, -1).float(), share)
    by_head = merged.reshape(layer.num_kv_heads, -1, group, layer.head_size)
    return by_head.transpose(0, 1).reshape(query.shape).to(query.dtype)


def _attend(
    layer: AttentionLayer,
    query: torch.Tensor,
    source: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, num_kv_heads, rows, head_size] and the scores' log-sum-exp, float32 [n, num_kv_heads, rows]."""
    keys, values = (tensor.to(query.dtype) for tensor in source)
    # torch's public function keeps the log-sum-exp to itself.
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=layer.scale
    )
    return output, lse
