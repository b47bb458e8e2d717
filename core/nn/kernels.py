"""Kernels of linear layers in full precision."""

from __future__ import annotations

import torch

from dovetail.contracts.quantization import LinearKernel
from dovetail.contracts.weights import PackedTensor


class TorchLinear(LinearKernel):
    """Weights as they are, multiplied by torch."""

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        """[out_features, in_features]; `load` writes into it."""

    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None:
        """Copies, converting dtype and device."""
        self.weight[rows].copy_(unpacked(weight))

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x @ weight.T + bias."""
        return torch.nn.functional.linear(x, self.weight, bias)


class PackedLinear(LinearKernel):
    """bfloat16 weights in oneDNN's own layout, made once.

    torch hands oneDNN plain weights, which it rearranges anew in every call; for one row of activations that costs
    as much as the multiplication.
    """

    def __init__(self, weight: torch.Tensor):
        self._weight: torch.Tensor | None = weight
        self._shape = weight.shape
        self._packed: torch.Tensor | None = None

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether oneDNN multiplies this dtype here."""
        return (
            device.type == "cpu"
            and dtype == torch.bfloat16
            and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
            and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )

    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None:
        """Copies; after `finish`, into fresh rows, all of which must then be given again."""
        if self._weight is None:
            self._weight = torch.empty(self._shape, dtype=torch.bfloat16)
        self._weight[rows].copy_(unpacked(weight))

    def finish(self) -> None:
        """Packs, and lets go of the plain weights."""
        # The second argument is the number of rows to expect: decode steps are what a layout can speed up most.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, 1)
        self._weight = None

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x @ weight.T + bias, accumulated in float32."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return output


def unpacked(weight: torch.Tensor | PackedTensor) -> torch.Tensor:
    """The numbers that a weight stands for."""
    return weight.dequantized() if isinstance(weight, PackedTensor) else weight


def share_of(
    kernel: LinearKernel, weight: torch.Tensor | PackedTensor, take: tuple[slice, slice]
) -> torch.Tensor | PackedTensor:
    """Rows and columns of `weight` for `kernel`. For plain kernels a packed weight is unpacked first, so that columns
    may cut through its blocks; for others that raises `ModelError`."""
    return (unpacked(weight) if isinstance(kernel, TorchLinear | PackedLinear) else weight)[take]


def plain_kernel(weight: torch.Tensor) -> LinearKernel:
    """The kernel that holds `weight`, or what is loaded into it, in full precision on its device."""
    return PackedLinear(weight) if PackedLinear.serves(weight.device, weight.dtype) else TorchLinear(weight)
