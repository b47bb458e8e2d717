"""The method: which layers it serves, and how one is held and multiplied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field, field_validator

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.quantization import (
    Findings,
    KeepsPacked,
    LayerSupport,
    LinearKernel,
    LinearShape,
    QuantizationCapabilities,
    QuantizationMethod,
)
from dovetail.contracts.weights import PackedTensor
from dovetail.nn import TiledLinear
from dovetail.nn.skipped import against_skip, is_skipped
from dovetail_nf4.codes import constants, packed_codes, rounded_constants, written_out

WRITTEN_OUT = 2**18
"""Weights that are written out at a time: they stay in the second-level cache until they are multiplied."""


class NF4Options(PluginOptions):
    """Options of `nf4`."""

    block_size: int = Field(default=64, ge=2, le=1024)
    """Weights of a row that share one constant (QLoRA: 64); an even number."""
    skip: tuple[str, ...] = ("lm_head",)
    """Layers whose dotted name contains one of these stay in full precision."""

    @field_validator("block_size")
    @classmethod
    def _is_even(cls, size: int) -> int:
        if size % 2:
            raise ValueError(f"block_size is {size}, and two weights share a byte: take an even number")
        return size


class NF4Method(QuantizationMethod):
    """Holds linear weights in 4.1 bits: NormalFloat codes, and 8 bits for each block of 64."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = NF4Options
    stability = "experimental"
    capabilities = QuantizationCapabilities(
        device_types=frozenset({"cpu"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        batch_invariant=True,
        reloads_rows=True,
    )
    options: NF4Options

    def describe(self, shape: LinearShape) -> LayerSupport:
        """Half a byte a weight, a byte a block and 8 bytes a row; every product writes the weights out."""
        size = self.options.block_size
        if is_skipped(shape.name, self.options.skip):
            return LayerSupport()
        if shape.in_features % size:
            return LayerSupport(why_not=f"input sizes that are no multiple of {size} (option block_size)")
        return LayerSupport(is_served=True, bytes_per_weight=0.5 + 1 / size + 8 / shape.in_features)

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        """Returns a kernel of zeros."""
        kernel = NF4Linear(shape, device, self.options.block_size)
        if not self.need.batch_invariant:
            return kernel
        return TiledLinear(kernel, shape.in_features, torch.empty(0, dtype=getattr(torch, self.need.dtype)))

    def examine(self, shapes: Sequence[LinearShape]) -> Findings:
        """Skipped layers that are not there, and what a user of the method gives for the memory."""
        return Findings(
            refusals=against_skip(self.options.skip, shapes, usual=NF4Options().skip),
            warnings=("saves memory, not time: its weights are written out for every product",),
        )


class NF4Linear(KeepsPacked):
    """One linear layer: uint8 [out_features, in_features / 2], float8 [out_features, in_features / block_size] and
    float32 [out_features, 2]. Nothing else of the weights is held, and no more than `WRITTEN_OUT` are ever written out,
    or one row."""

    def __init__(self, shape: LinearShape, device: torch.device, block_size: int):
        rows, columns = shape.out_features, shape.in_features
        self._block_size = block_size
        self._codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
        self._offsets = torch.empty(rows, columns // block_size, dtype=torch.float8_e4m3fn, device=device)
        self._step_and_mean = torch.empty(rows, 2, dtype=torch.float32, device=device)
        self._rows_at_a_time = max(1, WRITTEN_OUT // columns)

    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None:
        """Rounds some rows at a time, so that few are ever held in full precision twice."""
        assert isinstance(weight, torch.Tensor), "the method holds no packed format, so it is handed none"
        for start in range(0, len(weight), self._rows_at_a_time):
            part = weight[start : start + self._rows_at_a_time].to(device=self._codes.device, dtype=torch.float32)
            place = slice(rows.start + start, rows.start + start + len(part))
            offsets, step_and_mean = rounded_constants(part, self._block_size)
            self._offsets[place], self._step_and_mean[place] = offsets, step_and_mean
            self._codes[place] = packed_codes(part, constants(offsets, step_and_mean))

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Writes out some rows of the weights at a time, in x's dtype, and multiplies by them."""
        num_rows, size = len(self._codes), self._rows_at_a_time
        if num_rows <= size:
            return torch.nn.functional.linear(x, self._rows(slice(None), x.dtype), bias)
        output = x.new_empty(len(x), num_rows)
        for start in range(0, num_rows, size):
            rows = slice(start, min(start + size, num_rows))
            part_bias = None if bias is None else bias[rows]
            output[:, rows] = torch.nn.functional.linear(x, self._rows(rows, x.dtype), part_bias)
        return output

    def _rows(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        return written_out(self._codes[rows], constants(self._offsets[rows], self._step_and_mean[rows]), dtype)

    def tensors(self) -> Iterable[torch.Tensor]:
        """The three of them."""
        return self.packed().values()

    def layout(self) -> str:
        """The same on every machine."""
        return f"nf4-1 blocks of {self._block_size}"

    def packed(self) -> Mapping[str, torch.Tensor]:
        """The three tensors as they are."""
        return {"codes": self._codes, "offsets": self._offsets, "step_and_mean": self._step_and_mean}

    def restore(self, packed: Mapping[str, torch.Tensor]) -> None:
        """Copies them."""
        for name, tensor in self.packed().items():
            tensor.copy_(packed[name])
