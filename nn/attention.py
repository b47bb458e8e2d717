"""The attention layer of a model: where the module meets the attention backend and the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.contracts.attention import AttentionBackend, AttentionLayer, MovesSlots, RotatesAndWrites
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kv import KVSpec
from dovetail.contracts.model import ModelContext
from dovetail.nn.rope import Rotation

NOT_BOUND = "the attention layer has no backend yet: call bind() first"


class Attention(torch.nn.Module):
    """Attention over the KV cache of one layer.

    Creating the layer registers it in `context.attention_layers`. The runner gives it a backend and its cache with
    `bind` before the first forward pass. Head counts are those of this rank. `key_scale`, `value_scale` and `chunk` are
    those of `AttentionLayer`. A window or chunk that no sequence of the context exceeds is dropped: it equals full
    attention. With `has_sinks`, `layer.sinks` exists and is filled when weights are loaded (`AttentionLayer.sinks`).
    """

    def __init__(
        self,
        context: ModelContext,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Sequence[float] | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        has_sinks: bool = False,
        chunk: int | None = None,
    ):
        super().__init__()
        if window is not None and window >= context.max_model_len:
            window = None
        if chunk is not None and chunk >= context.max_model_len:
            chunk = None
        self.layer = AttentionLayer(
            layer_id=len(context.attention_layers),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            alibi_slopes=None if alibi_slopes is None else tuple(alibi_slopes),
            key_scale=key_scale,
            value_scale=value_scale,
            first_head=context.tp_rank * num_heads,
            total_heads=context.tp_size * num_heads,
            sinks=torch.zeros(num_heads, dtype=torch.float32, device=context.device) if has_sinks else None,
            chunk=chunk,
        )
        self.cache = KVSpec(
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=context.kv_dtype,
            window=window if chunk is None else chunk,
        )
        """What the layer keeps between steps."""
        self._backend: AttentionBackend | None = None
        self._kv_cache: torch.Tensor | None = None
        self._rotating: RotatesAndWrites | None = None
        """The backend, where it rotates by itself."""
        context.attention_layers.append(self)

    def bind(self, backend: AttentionBackend, kv_cache: torch.Tensor) -> None:
        """Makes the layer call `backend` from now on, with `kv_cache`, a tensor of the backend's `kv_cache_shape`."""
        self._backend = backend
        self._kv_cache = kv_cache
        self._rotating = backend if isinstance(backend, RotatesAndWrites) else None

    def move_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies cached keys and values of single tokens as `MovesSlots.move_slots` does."""
        move_slots(self._backend, self._kv_cache, source, target)

    def rotate_and_forward(self, queries_keys: torch.Tensor, value: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Does what `forward` does, for queries and keys that are not rotated yet.

        Queries and keys are one tensor, [T, num_heads + num_kv_heads, head_size], so that one rotation serves both; the
        tensor may be overwritten. A backend that `RotatesAndWrites` rotates while it writes the pages; for others the
        model's operators rotate.
        """
        left: Rotation | None = rotation
        if self._rotating is None:
            queries_keys, left = rotation.apply(queries_keys), None
        num_heads = self.layer.num_heads
        # Through `forward`, which torch.compile is kept out of; this function it may fuse with what came before.
        output: torch.Tensor = self(queries_keys[:, :num_heads], queries_keys[:, num_heads:], value, left)
        return output

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation | None = None
    ) -> torch.Tensor:
        """Attends: query [T, num_heads * head_size] or [T, num_heads, head_size], key and value likewise with
        num_kv_heads -> [T, num_heads * head_size]. Queries and keys are rotated already, unless `rotate_and_forward`
        leaves a `rotation` to the backend."""
        if self._backend is None or self._kv_cache is None:
            raise RuntimeError(NOT_BOUND)
        layer, kv_cache = self.layer, self._kv_cache
        num_tokens = query.shape[0]
        query = query.view(num_tokens, layer.num_heads, layer.head_size)
        key = key.view(num_tokens, layer.num_kv_heads, layer.head_size)
        value = value.view(num_tokens, layer.num_kv_heads, layer.head_size)
        if rotation is None or self._rotating is None:
            output = self._backend.forward(layer, query, key, value, kv_cache)
        else:
            output = self._rotating.rotate_and_forward(layer, query, key, value, rotation.cos, rotation.sin, kv_cache)
        return output.reshape(num_tokens, layer.num_heads * layer.head_size)


def move_slots(
    backend: AttentionBackend | None, kv_cache: torch.Tensor | None, source: torch.Tensor, target: torch.Tensor
) -> None:
    """What `AttentionModule.move_slots` does, over the backend and the cache that the layer is bound to."""
    if backend is None or kv_cache is None:
        raise RuntimeError(NOT_BOUND)
    if not isinstance(backend, MovesSlots):
        raise PluginError(
            f"{type(backend).__name__} declares trees and is no MovesSlots: derive it from that class, or leave trees "
            "out of its capabilities"
        )
    backend.move_slots(kv_cache, source, target)
