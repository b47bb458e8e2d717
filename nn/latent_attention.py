"""Multi-head latent attention: one cached vector per token, from which keys and values of all heads are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dovetail.contracts.attention import AttendsLatents, AttentionBackend, AttentionLayer
from dovetail.contracts.errors import PluginError
from dovetail.contracts.kv import LatentSpec
from dovetail.contracts.model import ModelContext
from dovetail.nn.attention import NOT_BOUND, move_slots
from dovetail.nn.kernels import TiledLinear, TorchLinear
from dovetail.nn.loading import WeightHolder


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Sizes of multi-head latent attention, in elements (DeepSeek-V2, section 2.1.4)."""

    num_heads: int
    """Of all ranks together."""
    latent_size: int
    """The latent vector, d_c in the paper."""
    key_size: int
    """What is computed of it for the key of one head: the part that is not rotated."""
    rotary_size: int
    """The rotated part of queries, and the rotated key that all heads share."""
    value_size: int
    """The value of one head."""


class LatentAttention(WeightHolder):
    """Attention over cached latent vectors, with the up-projections to keys and values absorbed: a query is multiplied
    by the up-projection of its head's keys, and what is attended to by that of its values, so that no key or value of
    a cached token is ever computed (DeepSeek-V2, section 2.1.2).

    `name` is the up-projection in the checkpoint: [num_heads * (key_size + value_size), latent_size], the rows of a
    head together, its keys first. Each rank takes the rows of its heads, in full precision. The cached vectors are the
    same on every rank. Creating the layer registers it in `context.attention_layers`.
    """

    def __init__(self, context: ModelContext, name: str, shape: LatentShape, scale: float):
        super().__init__()
        num_heads = context.divide(shape.num_heads, "the number of attention heads")
        self.shape = shape
        self.layer = AttentionLayer(
            layer_id=len(context.attention_layers),
            num_heads=num_heads,
            num_kv_heads=1,
            head_size=shape.latent_size + shape.rotary_size,
            scale=scale,
            first_head=context.tp_rank * num_heads,
            total_heads=shape.num_heads,
        )
        self.cache = LatentSpec(latent_size=shape.latent_size, rotary_size=shape.rotary_size, dtype=context.kv_dtype)
        """What the layer keeps between steps."""
        self._name = f"{name}.weight"
        self._up = context.empty(num_heads, shape.key_size + shape.value_size, shape.latent_size)
        key_up, value_up = self._up[:, : shape.key_size], self._up[:, shape.key_size :]
        self._absorb_key = _ByHead(key_up.transpose(1, 2), batch_invariant=context.batch_invariant)
        self._compute_values = _ByHead(value_up, batch_invariant=context.batch_invariant)
        self._backend: AttendsLatents | None = None
        self._kv_cache: torch.Tensor | None = None
        context.attention_layers.append(self)

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """The up-projection of all heads."""
        shape = self.shape
        return {self._name: (shape.num_heads * (shape.key_size + shape.value_size), shape.latent_size)}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Keeps the rows of this rank's heads."""
        first = self.layer.first_head
        self._up.copy_(tensor.view(-1, *self._up.shape[1:])[first : first + self.layer.num_heads])

    def finish(self) -> None:
        """Lets the products by head look at their weights."""
        self._absorb_key.finish()
        self._compute_values.finish()

    def bind(self, backend: AttentionBackend, kv_cache: torch.Tensor) -> None:
        """Makes the layer call `backend` from now on, with `kv_cache`, a tensor of the backend's `kv_cache_shape`.
        Raises `PluginError` for a backend that is no `AttendsLatents`."""
        if not isinstance(backend, AttendsLatents):
            raise PluginError(
                f"{type(backend).__name__} declares latents and is no AttendsLatents: derive it from that class, or "
                "leave latents out of its capabilities"
            )
        self._backend = backend
        self._kv_cache = kv_cache

    def move_slots(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies cached vectors of single tokens as `MovesSlots.move_slots` does."""
        move_slots(self._backend, self._kv_cache, source, target)

    def forward(self, query: torch.Tensor, rotated: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """Attends: query [T, num_heads, key_size] and its rotated part [T, num_heads, rotary_size]; latent [T,
        latent_size + rotary_size], the rotated key last -> [T, num_heads * value_size]. Heads are those of this
        rank."""
        if self._backend is None or self._kv_cache is None:
            raise RuntimeError(NOT_BOUND)
        absorbed = torch.cat((self._absorb_key(query), rotated), dim=-1)
        attended = self._backend.latent_forward(self.layer, absorbed, latent, self._kv_cache)
        return self._compute_values(attended).flatten(1)


class _ByHead:
    """Multiplies [T, num_heads, a] by the weights [num_heads, b, a] of each head -> [T, num_heads, b]."""

    def __init__(self, weights: torch.Tensor, *, batch_invariant: bool):
        self._weights = weights
        self._tiled = [
            TiledLinear(TorchLinear(weight), weight.shape[1], weight) for weight in weights if batch_invariant
        ]
        """For each head, where rows must not change each other's bits."""

    def finish(self) -> None:
        """Called when the weights are there."""
        for kernel in self._tiled:
            kernel.finish()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._tiled:
            return torch.stack([kernel.apply(x[:, head], None) for head, kernel in enumerate(self._tiled)], dim=1)
        return torch.bmm(x.transpose(0, 1), self._weights.transpose(1, 2)).transpose(0, 1)
