"""The attention layer of an encoder: tokens see their whole sequence, and nothing is kept between steps."""

from __future__ import annotations

import torch

from dovetail.contracts.attention import AttendsBothWays, AttentionBackend, AttentionLayer, TransientSpec
from dovetail.contracts.errors import PluginError
from dovetail.contracts.model import ModelContext
from dovetail.nn.attention import NOT_BOUND


class EncoderAttention(torch.nn.Module):
    """Attention of each token to all tokens of its request, those that follow it included.

    There are no pages: requests are computed whole in one step, and a model with such layers has no others. Creating
    the layer registers it in `context.attention_layers`. Head counts are those of this rank.
    """

    def __init__(self, context: ModelContext, num_heads: int, num_kv_heads: int, head_size: int, scale: float):
        super().__init__()
        self.layer = AttentionLayer(
            layer_id=len(context.attention_layers),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=scale,
            first_head=context.tp_rank * num_heads,
            total_heads=context.tp_size * num_heads,
            causal=False,
        )
        self.cache = TransientSpec(num_kv_heads=num_kv_heads, head_size=head_size, dtype=context.kv_dtype)
        """What the layer keeps between steps: nothing."""
        self._backend: AttendsBothWays | None = None
        context.attention_layers.append(self)

    def bind(self, backend: AttentionBackend, kv_cache: torch.Tensor) -> None:
        """Makes the layer call `backend` from now on; `kv_cache` is empty. Raises `PluginError` for a backend that is
        no `AttendsBothWays`."""
        if not isinstance(backend, AttendsBothWays):
            raise PluginError(
                f"{type(backend).__name__} is no AttendsBothWays, which an encoder's layers need: choose another "
                "attention backend, or auto"
            )
        self._backend = backend

    def move_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Raises `PluginError`: there are no slots, since no request of an encoder has drafts."""
        raise PluginError("an encoder's attention layer keeps nothing, so that there are no slots to move")

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attends: query [T, num_heads * head_size] or [T, num_heads, head_size], key and value likewise with
        num_kv_heads -> [T, num_heads * head_size]."""
        if self._backend is None:
            raise RuntimeError(NOT_BOUND)
        layer, num_tokens = self.layer, query.shape[0]
        query = query.view(num_tokens, layer.num_heads, layer.head_size)
        key = key.view(num_tokens, layer.num_kv_heads, layer.head_size)
        value = value.view(num_tokens, layer.num_kv_heads, layer.head_size)
        output = self._backend.both_ways_forward(layer, query, key, value)
        return output.reshape(num_tokens, layer.num_heads * layer.head_size)
