"""Eight bits for weights and activations: `fp8` and `w8a8` (int8), multiplied by the matrix units of GPUs.

Weights get one scale per output feature, rounded at load; activations one per token, found in each call (SmoothQuant,
Xiao et al. 2023, section 2, "per-token dynamic"; FP8 Formats for Deep Learning, Micikevicius et al. 2022, section 3).
"""

from __future__ import annotations

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

_FP8 = torch.float8_e4m3fn
_FP8_MOST = 448.0
_INT8_MOST = 127.0
_LEAST_INT8_ROWS = 17
"""torch's int8 product on GPUs wants more than 16 rows; fewer are filled up."""
_TINY = torch.finfo(torch.float32).tiny


class EightBitOptions(PluginOptions):
    """Options of `fp8` and `w8a8`."""

    skip: tuple[str, ...] = ("lm_head",)
    """Layers whose dotted name contains one of these stay in full precision."""


class _EightBitMethod(QuantizationMethod):
    """What the two have in common."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = EightBitOptions
    stability = "experimental"
    capabilities = QuantizationCapabilities(
        device_types=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        reloads_rows=True,
        graph_capture=True,
    )
    options: EightBitOptions

    on_cpus: ClassVar[str]
    """Why CPUs are slow with it."""

    @classmethod
    def check(cls, need: QuantizationNeed, options: EightBitOptions, environment: Environment) -> list[str]:
        """On a GPU Triton, which rounds the activations."""
        return reasons_against_triton(environment) if need.device_type == "cuda" else []

    def describe(self, shape: LinearShape) -> LayerSupport:
        """One byte a weight and a float32 scale per row, except for the layers that `skip` names and for sizes that
        matrix units do not take. They read the weights as they are; on CPUs fp8 is widened in each call, and int8
        products are fast with VNNI alone."""
        if is_skipped(shape.name, self.options.skip):
            return LayerSupport()
        if not _fits(shape):
            return LayerSupport(why_not="sizes that are no multiples of 16")
        reads_once = self.need.device_type != "cpu"
        return LayerSupport(is_served=True, bytes_per_weight=1 + 4 / shape.in_features, reads_once=reads_once)

    def examine(self, shapes: Sequence[LinearShape]) -> Findings:
        """Skipped layers that are not there; and that CPUs are slow with it."""
        slow = (
            f"is made for GPUs, and on CPUs serves to compare with them: {self.on_cpus}; q8 is the method for CPUs",
        )
        return Findings(
            refusals=against_skip(self.options.skip, shapes, usual=EightBitOptions().skip),
            warnings=slow if self.need.device_type == "cpu" else (),
        )


def _fits(shape: LinearShape) -> bool:
    return shape.in_features % 16 == 0 and shape.out_features % 16 == 0


class FP8Method(_EightBitMethod):
    """float8_e4m3fn weights and activations."""

    on_cpus = "all weights are widened to float32 in every call"

    @classmethod
    def check(cls, need: QuantizationNeed, options: EightBitOptions, environment: Environment) -> list[str]:
        """A GPU with fp8 units and Triton, or any CPU (which has none, and computes in the activations' dtype)."""
        reasons = []
        if need.device_type == "cuda" and need.dtype != "bfloat16":
            reasons.append(f"fp8 on a GPU takes bfloat16 activations, not {need.dtype}; set model.dtype")
        for device in environment.devices if need.device_type == "cuda" else ():
            if device.compute_capability < (8, 9):
                found = ".".join(map(str, device.compute_capability))
                reasons.append(f"fp8 needs compute capability 8.9; {device.name} has {found}: use w8a8")
        return reasons or super().check(need, options, environment)

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        """Returns an fp8 kernel."""
        return FP8Linear(shape, device)


class Int8ActivationMethod(_EightBitMethod):
    """int8 weights and activations."""

    on_cpus = "torch's int8 product is slower than its float32 one without VNNI instructions"

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        """Returns an int8 kernel."""
        return Int8ActivationLinear(shape, device)


class FP8Linear(LinearKernel):
    """One linear layer: float8 [out_features, in_features] and float32 [out_features]."""

    def __init__(self, shape: LinearShape, device: torch.device):
        self._weight = torch.empty(shape.out_features, shape.in_features, dtype=_FP8, device=device)
        self._scale = torch.empty(shape.out_features, dtype=torch.float32, device=device)

    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None:
        """Rounds as it comes."""
        assert isinstance(weight, torch.Tensor), "the method holds no packed format, so it is handed none"
        rounded, self._scale[rows] = _rounded(weight.to(self._scale.device), _FP8_MOST)
        self._weight[rows] = rounded.to(_FP8)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """One product of the matrix units, scaled by row and column."""
        if x.device.type == "cuda":
            return self._on_gpu(x, bias)
        values, scale = _rounded(x, _FP8_MOST)
        rounded = values.to(_FP8)
        y = torch.nn.functional.linear(rounded.float(), self._weight.float()) * scale[:, None] * self._scale
        return _with_bias(y.to(x.dtype), bias)

    def _on_gpu(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Two launches, or three for few tokens."""
        from dovetail.plugins.quantization.w8a8.fused import few_rows_products, quantize_rows, scale_products, suits_few

        rounded, scale = quantize_rows(x, _FP8, _FP8_MOST, _TINY * _FP8_MOST)
        if suits_few(x):
            return scale_products(few_rows_products(rounded, self._weight), scale, self._scale, bias, x.dtype)
        scales = scale[:, None], self._scale[None, :]
        return torch._scaled_mm(rounded, self._weight.t(), *scales, bias=bias, out_dtype=x.dtype)


class Int8ActivationLinear(LinearKernel):
    """One linear layer: int8 [out_features, in_features] and float32 [out_features]."""

    def __init__(self, shape: LinearShape, device: torch.device):
        self._weight = torch.empty(shape.out_features, shape.in_features, dtype=torch.int8, device=device)
        self._scale = torch.empty(shape.out_features, dtype=torch.float32, device=device)

    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None:
        """Rounds as it comes."""
        assert isinstance(weight, torch.Tensor), "the method holds no packed format, so it is handed none"
        rounded, self._scale[rows] = _rounded(weight.to(self._scale.device), _INT8_MOST)
        self._weight[rows] = rounded.round_().to(torch.int8)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """An integer product, exact, scaled by row and column."""
        if x.device.type == "cuda":
            return self._on_gpu(x, bias)
        values, scale = _rounded(x, _INT8_MOST)
        product = torch._int_mm(values.round_().to(torch.int8), self._weight.t())
        y = product.float() * scale[:, None] * self._scale
        return _with_bias(y.to(x.dtype), bias)

    def _on_gpu(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Three launches."""
        from dovetail.plugins.quantization.w8a8.fused import few_rows_products, quantize_rows, scale_products, suits_few

        few = suits_few(x)
        rounded, scale = quantize_rows(x, torch.int8, _INT8_MOST, _TINY * _INT8_MOST, 0 if few else _LEAST_INT8_ROWS)
        products = few_rows_products(rounded, self._weight) if few else torch._int_mm(rounded, self._weight.t())[None]
        return scale_products(products, scale, self._scale, bias, x.dtype)


def _rounded(x: torch.Tensor, most: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x scaled so that each row's largest magnitude is `most`, float32, and the scales of the rows."""
    wide = x.float()
    scale = wide.abs().amax(dim=-1).clamp_min(_TINY * most) / most
    return wide / scale[:, None], scale


def _with_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias
