"""Eight bits and one scale per row."""

import torch

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.quantization import (
    LayerSupport,
    LinearKernel,
    LinearShape,
    QuantizationCapabilities,
    QuantizationMethod,
)


class Options(PluginOptions):
    skip: tuple[str, ...] = ()


class Kernel(LinearKernel):
    def __init__(self, shape: LinearShape, device: torch.device):
        self._numbers = torch.zeros(shape.out_features, shape.in_features, dtype=torch.int8, device=device)
        self._scales = torch.zeros(shape.out_features, 1, device=device)

    def load(self, rows: slice, weight: torch.Tensor) -> None:
        wide = weight.float()
        scales = (wide.abs().amax(dim=1, keepdim=True) / 127).clamp_min(1e-30)
        self._numbers[rows] = (wide / scales).round().to(torch.int8)
        self._scales[rows] = scales

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product = torch.nn.functional.linear(x, (self._numbers * self._scales).to(x.dtype))
        return product if bias is None else product + bias


class Frozen(QuantizationMethod):
    contract = (1, 0)
    Options = Options
    capabilities = QuantizationCapabilities(device_types=frozenset({"cpu"}), dtypes=None)

    def describe(self, shape: LinearShape) -> LayerSupport:
        if shape.name in self.options.skip:
            return LayerSupport()
        return LayerSupport(is_served=True, bytes_per_weight=1.0 + 4.0 / shape.in_features)

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        return Kernel(shape, device)
