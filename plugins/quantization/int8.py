"""Weight-only int8: each output channel of a linear layer as int8 with one scale, activations as they are.

The smallest useful quantization method, and a worked example of the contract. Symmetric rounding to nearest,
w ~ q * scale with scale = max |w| / 127 per output channel (LLM.int8(), Dettmers et al. 2022, section 2, without the
outlier decomposition), so every weight is off by at most scale / 2.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

import torch

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
from dovetail.contracts.weights import PackedTensor
from dovetail.nn.skipped import against_skip, is_skipped
from dovetail.nn.triton_check import reasons_against_triton

FEW_ROWS = 32
"""Up to so many rows, where the processor has instructions for bfloat16, torch's int8 kernel is hardly slower than its
bfloat16 product, before which weights would be written out (32 rows of 576 x 1,536 on AMD Zen 5: 174 and 145
microseconds). Where it has none, the int8 kernel is the faster one with any number of rows (3 times, with 32 rows and
with 128, on Zen 3), and always taken."""

_BLOCK = 16
"""torch's int8 kernel takes input features so many at a time, and reads beyond the end of what is left."""

_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}


class Int8Options(PluginOptions):
    """Options of `int8`."""

    skip: tuple[str, ...] = ("lm_head",)
    """Layers whose dotted name contains one of these stay in full precision."""


class Int8Method(QuantizationMethod):
    """Holds linear weights as int8 with a scale per output channel."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = Int8Options
    stability = "provisional"
    capabilities = QuantizationCapabilities(
        device_types=None,
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        reloads_rows=True,
        graph_capture=True,
    )
    options: Int8Options

    @classmethod
    def check(cls, need: QuantizationNeed, options: Int8Options, environment: Environment) -> list[str]:
        """On CPUs bfloat16 activations, the only ones that torch's int8 kernel is fast with. On GPUs Triton: weights
        written out for each call would be slower than weights that were not rounded."""
        if need.device_type == "cuda":
            return reasons_against_triton(environment)
        if need.device_type != "cpu" or need.dtype == "bfloat16":
            return []
        slowly = "" if environment.cpu_features & _BFLOAT16 else ", which this processor computes prompts slowly in"
        return [
            f"on CPUs int8 with {need.dtype} activations is slower than no quantization: use q8, which takes any, or"
            f" set model.dtype to bfloat16{slowly}"
        ]

    def describe(self, shape: LinearShape) -> LayerSupport:
        """One byte a weight and a float32 scale per row, except for the layers that `skip` names. torch's kernel, on
        CPUs, and Triton's, on GPUs, read them as they are; elsewhere they are written out for each call."""
        if is_skipped(shape.name, self.options.skip):
            return LayerSupport()
        has_kernel = self.need.device_type == "cpu" and shape.in_features % _BLOCK == 0
        reads_once = has_kernel or self.need.device_type == "cuda"
        return LayerSupport(is_served=True, bytes_per_weight=1 + 4 / shape.in_features, reads_once=reads_once)

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        """Returns an int8 kernel."""
        return Int8Linear(shape, device)

    def examine(self, shapes: Sequence[LinearShape]) -> Findings:
        """Skipped layers that are not there."""
        return Findings(refusals=against_skip(self.options.skip, shapes, usual=Int8Options().skip))


class Int8Linear(LinearKernel):
    """One linear layer: int8 [out_features, in_features] and float32 [out_features]."""

    def __init__(self, shape: LinearShape, device: torch.device):
        self._quantized = torch.empty(shape.out_features, shape.in_features, dtype=torch.int8, device=device)
        self._scale = torch.empty(shape.out_features, dtype=torch.float32, device=device)
        self._has_kernel = device.type == "cpu" and shape.in_features % _BLOCK == 0

    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None:
        """Rounds as it comes, so that no more than one part is ever held in full precision."""
        assert isinstance(weight, torch.Tensor), "the method holds no packed format, so it is handed none"
        weight = weight.to(device=self._scale.device, dtype=torch.float32)
        # A channel of zeros needs no scale, but must not divide by zero.
        scale = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        self._scale[rows] = scale
        self._quantized[rows] = (weight / scale[:, None]).round().to(torch.int8)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Through a kernel for int8 weights, or many rows through weights dequantized for the call, where that is
        faster."""
        if x.device.type == "cuda":
            from dovetail.plugins.quantization.int8_kernel import multiplied

            y = multiplied(x, self._quantized, self._scale)
            return y if bias is None else y + bias
        if self._has_kernel and x.dtype == torch.bfloat16 and (x.shape[0] <= FEW_ROWS or not _multiplies_bfloat16()):
            y = torch.ops.aten._weight_int8pack_mm(x.contiguous(), self._quantized, self._scale.to(x.dtype))
            return y if bias is None else y + bias
        return torch.nn.functional.linear(x, self.dequantized(x.dtype), bias)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the weights that the int8 values encode."""
        return (self._quantized * self._scale[:, None]).to(dtype)


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Whether oneDNN has a product of bfloat16 numbers here."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
