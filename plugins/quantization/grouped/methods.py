"""The methods that hold weights in groups: rounded to 8 or 4 bits, or as a GGUF file has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.quantization import (
    LinearKernel,
    LinearShape,
    QuantizationCapabilities,
    QuantizationMethod,
    QuantizationNeed,
)
from dovetail.nn import native
from dovetail.nn.huge_pages import WeightMemory
from dovetail.nn.skipped import against_skip, is_skipped
from dovetail.plugins.quantization.grouped.formats import EIGHT, FOUR, GROUP_FORMATS, PACKED_FORMATS
from dovetail.plugins.quantization.grouped.kernel import BLOCK, SOURCE, GroupedLinear, MixedLinear, Rounding, layout
from dovetail.plugins.quantization.grouped.rounding import round_to_eight, round_to_four


class GroupedOptions(PluginOptions):
    """Options of `q8` and `q4`."""

    skip: tuple[str, ...] = ()
    """Layers whose dotted name contains one of these stay in full precision ("lm_head", "model.embed_tokens", ...)."""


class GroupedMethod(QuantizationMethod):
    """What the methods have in common."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    stability = "provisional"
    embeddings = True
    reloads_rows = True
    # Sums are of float32, which float64 activations would be in vain for.
    capabilities = QuantizationCapabilities(
        device_types=frozenset({"cpu"}), dtypes=frozenset({"float32", "float16", "bfloat16"}), batch_invariant=True
    )

    @classmethod
    def check(cls, need: QuantizationNeed, options: Any, environment: Environment) -> list[str]:
        """A C compiler."""
        return native.reasons_against(SOURCE)

    def __init__(self, options: PluginOptions, need: QuantizationNeed):
        super().__init__(options, need)
        self.memory = WeightMemory()
        """What the kernels lay their weights out in."""

    def layout(self) -> str:
        """Tiles of as many rows as the processor's vectors have lanes."""
        return layout()

    def reads_only_held(self) -> bool:
        """Groups are multiplied as they are."""
        return True

    def why_not(self, shape: LinearShape) -> str | None:
        """Input sizes that leave a broken block."""
        return f"input sizes that are no multiple of {BLOCK}" if shape.in_features % BLOCK else None


class RoundingMethod(GroupedMethod):
    """What `q8` and `q4` have in common."""

    Options = GroupedOptions
    options: GroupedOptions

    def linear(self, shape: LinearShape, rounding: Rounding) -> LinearKernel | None:
        """A kernel, except for skipped layers and input sizes that leave a broken block."""
        if is_skipped(shape.name, self.options.skip) or shape.in_features % BLOCK:
            return None
        return GroupedLinear(shape, self.memory, rounding)

    def why_not(self, shape: LinearShape) -> str | None:
        """As every method over groups, of layers that are not skipped."""
        return None if is_skipped(shape.name, self.options.skip) else super().why_not(shape)

    def against_layers(self, shapes: Sequence[LinearShape]) -> list[str]:
        """Skipped layers that are not there."""
        return against_skip(self.options.skip, shapes)


class EightBitMethod(RoundingMethod):
    """8 bits a weight, one scale per 32: what GGUF calls Q8_0. Embeddings and output layer too."""

    for_drafters = True

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel | None:
        """Rounds every layer that is not skipped."""
        return self.linear(shape, round_to_eight)

    def bytes_per_weight(self) -> float:
        """Scales included."""
        return EIGHT.bytes_per_weight()


class FourBitMethod(RoundingMethod):
    """4 bits a weight, one scale and one minimum per 32 (GGUF's Q4_1), fitted by least squares. The table of token
    embeddings, and the output layer with it, takes 8 bits."""

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel | None:
        """Rounds every layer that is not skipped."""
        return self.linear(shape, round_to_eight if _is_vocabulary(shape) else round_to_four)

    def bytes_per_weight(self) -> float:
        """Of most layers, scales and minimums included."""
        return FOUR.bytes_per_weight()

    def layer_bytes_per_weight(self, shape: LinearShape) -> float:
        """More for the vocabulary's layers."""
        return EIGHT.bytes_per_weight() if _is_vocabulary(shape) else FOUR.bytes_per_weight()


def _is_vocabulary(shape: LinearShape) -> bool:
    return any(part in shape.name for part in ("embed", "lm_head"))


class GGUFMethod(GroupedMethod):
    """The weights of a GGUF file as they stand in it, in blocks of any kind. What the file stores as numbers stays in
    full precision."""

    holds = PACKED_FORMATS

    @classmethod
    def check(cls, need: QuantizationNeed, options: Any, environment: Environment) -> list[str]:
        """A packed checkpoint, and a C compiler."""
        if not need.packed_formats & PACKED_FORMATS:
            found = ", ".join(sorted(need.packed_formats)) or "not packed"
            return [f"gguf holds the blocks of GGUF files; the checkpoint's weights are {found}"]
        return super().check(need, options, environment)

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel | None:
        """Every layer; parts that the file does not pack stay in full precision."""
        if shape.in_features % BLOCK:
            return None
        return MixedLinear(shape, self.memory, getattr(torch, self.need.dtype), self.need.batch_invariant)

    def bytes_per_weight(self) -> float:
        """Of the checkpoint's smallest format: no layer takes less."""
        held = self.need.packed_formats & PACKED_FORMATS
        return min((GROUP_FORMATS[name].bytes_per_weight() for name in held), default=FOUR.bytes_per_weight())

    def held_bytes_per_weight(self, packed_format: str) -> float:
        """K-quants take more than in the file, where their scales are 4 to 8 bits, and I-quants of 1 to 3 bits, which
        name several weights at once there, 4 bits a weight."""
        return GROUP_FORMATS[packed_format].bytes_per_weight()
