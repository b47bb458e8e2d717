"""Modules without memory that refuse what the modules with memory would refuse half-way."""

from __future__ import annotations

from dataclasses import replace

import torch

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.quantization import LayerSupport, LinearShape, LooksUpRows, QuantizationMethod
from dovetail.contracts.weights import PackedTensor
from dovetail.nn.context import BuildContext

_META = torch.device("meta")


def rehearsal_context(context: BuildContext) -> BuildContext:
    """A context for the same module on the same rank, without memory."""
    method = None if context.quantization is None else _RehearsedMethod(context.quantization)
    # Layers that keep rows apart would multiply to find out how.
    return replace(context, device=_META, quantization=method, keeper=None, adapters=None, batch_invariant=False)


class _RehearsedKernel(LooksUpRows):
    """Takes any rows, and keeps none."""

    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None:
        return None

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError("a kernel without memory does not multiply")

    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError("a kernel without memory looks nothing up")


class _RehearsedMethod(QuantizationMethod):
    """Serves the layers that another method serves, under its rules."""

    def __init__(self, method: QuantizationMethod):
        super().__init__(PluginOptions(), method.need)
        self._method = method
        # Of the instance: what the blocks ask decides whether some rows of a fused layer may come alone.
        self.capabilities = method.capabilities  # type: ignore[misc]

    def describe(self, shape: LinearShape) -> LayerSupport:
        return self._method.describe(shape)

    def create_linear(self, shape: LinearShape, device: torch.device) -> LooksUpRows:
        return _RehearsedKernel()
