"""Quantization method: how a linear layer's weights are held and multiplied."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.contracts.plugin import Plugin, PluginOptions

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class QuantizationNeed:
    """What the config asks of a method; the argument of `check`."""

    device_type: str
    dtype: str
    """dtype of activations."""


@dataclass(frozen=True)
class LinearShape:
    """One linear layer on one rank, fused parts together."""

    name: str
    """Dotted path in the model, "model.layers.0.mlp.gate_up_proj"."""
    in_features: int
    out_features: int
    has_bias: bool


class LinearKernel:
    """The weights of one linear layer in the method's own form. Created on the worker's device."""

    @abstractmethod
    def load(self, rows: slice, weight: torch.Tensor) -> None:
        """Takes the full-precision weights of output rows `rows` ([rows, in_features]); called once per fused part,
        until every row was given."""

    def finish(self) -> None:
        """All rows were given: pack, and drop what is no longer needed."""
        return None

    @abstractmethod
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in_features] -> [T, out_features], in x's dtype."""


class QuantizationMethod(Plugin):
    """Creates the kernel of each linear layer, or leaves a layer to plain torch."""

    def __init__(self, options: PluginOptions, need: QuantizationNeed):
        self.options = options
        self.need = need

    @abstractmethod
    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel | None:
        """The kernel for one layer; None: this layer stays in full precision."""

    @abstractmethod
    def bytes_per_weight(self) -> float:
        """Bytes that one quantized weight takes, scales included: for memory estimates."""
