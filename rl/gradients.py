"""The engine's kernels with gradients: values have the bits of the kernels, gradients are those of a formula in torch.

A trainer that computes with kernels of its own gets other numbers than the engine for the same weights. Here the
forward pass is the engine's, and only the backward pass is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from dovetail.contracts.attention import AttentionBackend, AttentionBatch, AttentionLayer, AttentionSetup
from dovetail.contracts.errors import ModelError
from dovetail.contracts.operators import Operators
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.quantization import LinearKernel, LinearShape, LooksUpRows
from dovetail.contracts.weights import PackedTensor
from dovetail.nn.context import BuildContext
from dovetail.nn.kernels import plain_kernel, unpacked

Compute = Callable[..., tuple[torch.Tensor, ...]]
"""From tensors to tensors."""


class _Paired(torch.autograd.Function):
    """Values of one function, gradients of another that is equal to it but for rounding."""

    @staticmethod
    def forward(ctx: Any, compute: Compute, formula: Compute, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.formula = formula
        ctx.save_for_backward(*tensors)
        return compute(*(tensor.detach() for tensor in tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            inputs = [
                tensor.detach().to(_wide(tensor)).requires_grad_(is_wanted)
                for tensor, is_wanted in zip(ctx.saved_tensors, wanted, strict=True)
            ]
            outputs = ctx.formula(*inputs)
        variables = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(outputs, variables, [one.to(_wide(one)) for one in gradients]))
        given = zip(ctx.saved_tensors, wanted, strict=True)
        return (None, None, *(next(found).to(tensor.dtype) if is_wanted else None for tensor, is_wanted in given))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """That of gradients: float32, or float64 where values have it."""
    return torch.promote_types(tensor.dtype, torch.float32)


def paired(compute: Compute, formula: Compute, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """compute(*tensors), whose gradients are those of formula(*tensors), taken in float32. `compute` must return new
    tensors and leave its arguments unchanged."""
    return _Paired.apply(compute, formula, *tensors)  # type: ignore[no-untyped-call]


class GradientOperators(Operators):
    """The operators of another set, with gradients. Nothing is overwritten."""

    def __init__(self, inner: Operators):
        super().__init__(PluginOptions())
        self._inner = inner

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Operators.rms_norm`."""
        return paired(
            lambda x, weight: (self._inner.rms_norm(x, weight, eps),),
            lambda x, weight: (_rms_norm(x, weight, eps),),
            x,
            weight,
        )[0]

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Operators.add_rms_norm`."""
        normed, total = paired(
            lambda x, residual, weight: self._inner.add_rms_norm(x.clone(), residual.clone(), weight, eps),
            lambda x, residual, weight: (_rms_norm(x + residual, weight, eps), x + residual),
            x,
            residual,
            weight,
        )
        return normed, total

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operators.silu_mul`."""

        def formula(gate_up: torch.Tensor) -> tuple[torch.Tensor, ...]:
            gate, up = gate_up.chunk(2, dim=-1)
            return (torch.nn.functional.silu(gate) * up,)

        return paired(lambda gate_up: (self._inner.silu_mul(gate_up),), formula, gate_up)[0]

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See `Operators.rotate`."""

        def formula(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rotated, rest = heads[..., : cos.shape[-1]], heads[..., cos.shape[-1] :]
            swapped = torch.cat(rotated.chunk(2, dim=-1)[::-1], dim=-1)
            return (torch.cat((rotated * cos + swapped * sin, rest), dim=-1),)

        return paired(lambda heads, cos, sin: (self._inner.rotate(heads.clone(), cos, sin),), formula, heads, cos, sin)[
            0
        ]

    def take_rows(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Of tables that are no weights: without gradients."""
        return self._inner.take_rows(table, ids)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class GradientLinear(LooksUpRows):
    """The engine's kernel in full precision, whose gradients go to the tensors that `load` was given."""

    def __init__(self, weight: torch.Tensor, *, batch_invariant: bool):
        self._inner = plain_kernel(weight, batch_invariant=batch_invariant)
        self._dtype = weight.dtype
        self._parts: list[tuple[int, torch.Tensor]] = []
        self._weight = weight.new_empty(0)

    def begin_loading(self) -> None:
        """All rows will be given."""
        self._parts = []

    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None:
        """Keeps the rows, and what they were computed from."""
        self._parts.append((rows.start, unpacked(weight).to(self._dtype)))

    def finish(self) -> None:
        """Packs the weights for the engine's kernel."""
        self._weight = torch.cat([part for _, part in sorted(self._parts, key=lambda part: part[0])])
        with torch.no_grad():
            self._inner.load(slice(0, len(self._weight)), self._weight)
            self._inner.finish()

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `LinearKernel.apply`."""
        biases = () if bias is None else (bias,)
        return paired(self._product, torch_linear, x, self._weight, *biases)[0]

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """See `LooksUpRows.lookup`."""
        return torch.nn.functional.embedding(ids, self._weight).to(dtype)

    def _product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor]:
        """`weight` is what the kernel has packed."""
        return (self._inner.apply(x, bias),)


def torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor]:
    """(x @ weight.T + bias,)"""
    return (torch.nn.functional.linear(x, weight, bias),)


@dataclass
class GradientContext(BuildContext):
    """Builds a module whose gradients reach the tensors that it is loaded with. `operators` must have gradients too."""

    weights: list[torch.Tensor] = field(default_factory=list, init=False)
    """Norms and biases: what is no kernel."""
    kernels: list[GradientLinear] = field(default_factory=list, init=False)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """As `BuildContext.empty`, noted in `weights`."""
        tensor = super().empty(*shape, dtype=dtype)
        self.weights.append(tensor)
        return tensor

    def begin_loading(self) -> None:
        """Cuts norms and biases off from the parameters that they were loaded from, and drops what a round of loading
        that failed left in the kernels."""
        for tensor in self.weights:
            tensor.detach_()
        for kernel in self.kernels:
            kernel.begin_loading()

    def create_kernel(self, shape: LinearShape) -> LinearKernel:
        """One with gradients."""
        return self._create(shape)

    def create_plain_kernel(self, shape: LinearShape) -> LinearKernel:
        """One with gradients."""
        return self._create(shape)

    def create_embedding_kernel(self, shape: LinearShape) -> LooksUpRows:
        """One with gradients, so that an output layer which is tied to the table has them too."""
        return self._create(shape)

    def _create(self, shape: LinearShape) -> GradientLinear:
        weight = BuildContext.empty(self, shape.out_features, shape.in_features)
        self.kernels.append(GradientLinear(weight, batch_invariant=self.batch_invariant))
        return self.kernels[-1]


class GradientAttention(AttentionBackend):
    """Another backend, with gradients. It rotates nothing: the operators do."""

    def __init__(self, inner: AttentionBackend):
        """Raises `ModelError` for layers whose gradients are not known here."""
        for layer in inner.setup.layers:
            check_layer(layer, inner.setup)
        super().__init__(PluginOptions(), inner.setup)
        self._inner = inner
        self._bounds: Sequence[int] = (0,)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """The other backend's."""
        return self._inner.kv_cache_shape(num_blocks)

    def plan(self, batch: AttentionBatch) -> None:
        """Requests are computed whole in one step: their keys are those of the step."""
        self._bounds = batch.query_start.tolist()
        self._inner.plan(batch)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        bounds = self._bounds

        def formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor]:
            sequences = [
                _attended(layer, query[start:end], key[start:end], value[start:end]) for start, end in pairwise(bounds)
            ]
            return (torch.cat(sequences),)

        return paired(
            lambda query, key, value: (self._inner.forward(layer, query, key, value, kv_cache).clone(),),
            formula,
            query,
            key,
            value,
        )[0]


def check_layer(layer: AttentionLayer, setup: AttentionSetup) -> None:
    """Raises `ModelError` for a layer whose gradients are not known here."""
    unknown = {
        "ALiBi": layer.alibi_slopes is not None,
        "attention sinks": layer.sinks is not None,
        "chunked attention": layer.chunk is not None,
        "latent keys": setup.latent is not None,
        "attention in both directions": not layer.causal,
        f"KV pages in {setup.spec.dtype} under activations in {setup.dtype}": setup.spec.dtype != setup.dtype,
    }
    if found := [name for name, is_there in unknown.items() if is_there]:
        raise ModelError(f"no gradients are known of {' and '.join(found)}: train with another forward pass")


def _attended(layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of one sequence by its definition; [T, heads, head_size] each."""
    repeats = layer.num_heads // layer.num_kv_heads
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    places = torch.arange(len(query), device=query.device)
    distance = places[:, None] - places
    hidden = distance < 0
    if layer.window is not None:
        hidden |= distance >= layer.window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)
