"""The methods that hold weights in groups: rounded to 8 or 4 bits, or as a GGUF file has them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.quantization import (
    Findings,
    LayerSupport,
    LinearKernel,
    LinearShape,
    QuantizationCapabilities,
    QuantizationMethod,
    QuantizationNeed,
)
from dovetail.nn import native
from dovetail.nn.huge_pages import WeightMemory
from dovetail.nn.skipped import against_skip, is_skipped
from dovetail.plugins.quantization.grouped.formats import EIGHT, FOUR, GROUP_FORMATS, PACKED_FORMATS, GroupFormat
from dovetail.plugins.quantization.grouped.kernel import BLOCK, SOURCE, GroupedLinear, MixedLinear, Rounding
from dovetail.plugins.quantization.grouped.rounding import round_to_eight, round_to_four


class GroupedOptions(PluginOptions):
    """Options of `q8` and `q4`."""

    skip: tuple[str, ...] = ()
    """Layers whose dotted name contains one of these stay in full precision ("lm_head", "model.embed_tokens", ...)."""


_CAPABILITIES = QuantizationCapabilities(
    device_types=frozenset({"cpu"}),
    # Sums are in float32, which float64 activations would be in vain for.
    dtypes=frozenset({"float32", "bfloat16", "float16"}),
    embeddings=True,
    batch_invariant=True,
    reloads_rows=True,
    graph_capture=True,
)


class GroupedMethod(QuantizationMethod):
    """What the methods have in common."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    stability = "provisional"
    capabilities = _CAPABILITIES

    def __init__(self, options: PluginOptions, need: QuantizationNeed):
        super().__init__(options, need)
        self.memory = WeightMemory()
        """What the kernels lay their weights out in."""

    @classmethod
    def check(cls, need: QuantizationNeed, options: Any, environment: Environment) -> list[str]:
        """Refuses a machine on which the C kernels cannot be compiled."""
        return native.reasons_against(SOURCE)

    def described(self, shape: LinearShape, support: LayerSupport) -> LayerSupport:
        """`support` of layers whose input size leaves no broken block."""
        if shape.in_features % BLOCK:
            return LayerSupport(why_not=f"input sizes that are no multiple of {BLOCK}")
        return support


class RoundingMethod(GroupedMethod):
    """What `q8` and `q4` have in common."""

    Options = GroupedOptions
    options: GroupedOptions

    @abstractmethod
    def rounding(self, shape: LinearShape) -> tuple[GroupFormat, Rounding]:
        """How a layer's weights are rounded."""

    def describe(self, shape: LinearShape) -> LayerSupport:
        """Every layer that is not skipped. Groups are multiplied as they are."""
        if is_skipped(shape.name, self.options.skip):
            return LayerSupport()
        form, _ = self.rounding(shape)
        served = LayerSupport(is_served=True, bytes_per_weight=form.bytes_per_weight(), reads_once=True)
        return self.described(shape, served)

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        """Returns a kernel over groups."""
        return GroupedLinear(shape, self.memory, self.rounding(shape)[1])

    def examine(self, shapes: Sequence[LinearShape]) -> Findings:
        """Skipped layers that are not there."""
        return Findings(refusals=against_skip(self.options.skip, shapes))


class EightBitMethod(RoundingMethod):
    """8 bits a weight, one scale per 32: what GGUF calls Q8_0. Embeddings and output layer too."""

    capabilities = replace(_CAPABILITIES, for_drafters=True)

    def rounding(self, shape: LinearShape) -> tuple[GroupFormat, Rounding]:
        """Rounds to 8 bits."""
        return EIGHT, round_to_eight


class FourBitMethod(RoundingMethod):
    """4 bits a weight, one scale and one minimum per 32 (GGUF's Q4_1), fitted by least squares. The table of token
    embeddings, and the output layer with it, takes 8 bits."""

    def rounding(self, shape: LinearShape) -> tuple[GroupFormat, Rounding]:
        """4 bits, and 8 for the vocabulary's layers."""
        is_vocabulary = any(part in shape.name for part in ("embed", "lm_head"))
        return (EIGHT, round_to_eight) if is_vocabulary else (FOUR, round_to_four)


class GGUFMethod(GroupedMethod):
    """Holds the weights of a GGUF file unchanged, in blocks of any kind. What the file stores as numbers stays in full
    precision."""

    capabilities = replace(_CAPABILITIES, packed_formats=PACKED_FORMATS)

    @classmethod
    def check(cls, need: QuantizationNeed, options: Any, environment: Environment) -> list[str]:
        """A packed checkpoint, and a C compiler."""
        if not need.packed_formats & PACKED_FORMATS:
            found = ", ".join(sorted(need.packed_formats)) or "not packed"
            return [f"gguf holds the blocks of GGUF files; the checkpoint's weights are {found}"]
        return super().check(need, options, environment)

    def describe(self, shape: LinearShape) -> LayerSupport:
        """Every layer; parts that the file does not pack stay in full precision. K-quants take more than in the file,
        where their scales are 4 to 8 bits, and I-quants of 1 to 3 bits, which name several weights at once there, 4
        bits a weight."""
        served = LayerSupport(
            is_served=True,
            bytes_per_weight=DTYPE_BYTES[self.need.dtype],
            packed_bytes_per_weight={name: form.bytes_per_weight() for name, form in GROUP_FORMATS.items()},
            reads_once=True,
        )
        return self.described(shape, served)

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        """For packed parts and numbers side by side."""
        return MixedLinear(shape, self.memory, getattr(torch, self.need.dtype), self.need.batch_invariant)
