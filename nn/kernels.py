"""Kernels of linear layers in full precision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dovetail.contracts.quantization import LinearKernel
from dovetail.contracts.weights import PackedTensor

_ALIGNMENT = 64
"""Alignment of torch's own tensors, in bytes."""
_ROWS_EXPECTED = {torch.bfloat16: 1, torch.float32: None}
"""Rows of activations for which oneDNN chooses a layout; None: any number. A float32 layout for one row is slow for
two, and a layout for any number is as fast for one."""
TILE_ROWS = 8
"""Rows of a tile. More would make decoding of one request dearer, fewer prompts."""


class TorchLinear(LinearKernel):
    """Plain weights, multiplied by torch."""

    def __init__(self, weight: torch.Tensor):
        self.weight = weight
        """[out_features, in_features]; `load` writes into it."""

    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None:
        """Copies the rows, with dtype and device converted."""
        self.weight[rows].copy_(unpacked(weight))

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x @ weight.T + bias."""
        return torch.nn.functional.linear(x, self.weight, bias)


class PackedLinear(LinearKernel):
    """float32 or bfloat16 weights in oneDNN's own layout, made once.

    Plain weights are read out of order, or rearranged in every call. Packed float32 is 1.3 to 1.6 times as fast for one
    row, and twice as fast for the few rows of a verify step (2 AVX2 cores; benchmarks/RESULTS.md).
    """

    def __init__(self, weight: torch.Tensor):
        self._weight: torch.Tensor | None = weight
        self.shape = weight.shape
        """[out_features, in_features]"""
        self.dtype = weight.dtype
        self._packed: Any = None
        """A tensor in a layout that torch's type stubs do not know."""

    @staticmethod
    def serves(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether oneDNN multiplies this dtype on this machine."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        return dtype == torch.float32 or (
            dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        )

    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None:
        """Copies the rows; after `finish`, into a plain copy of the packed weights."""
        if self._weight is None and self._packed is None:
            self._weight = torch.empty(self.shape, dtype=self.dtype)
        elif self._weight is None:
            self._weight = self._packed.to_dense()
        self._weight[rows].copy_(unpacked(weight))

    def finish(self) -> None:
        """Packs the weights, into the memory of earlier ones if there are any, and drops the plain weights."""
        if self._weight is None:
            return
        packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, _ROWS_EXPECTED[self.dtype])
        self._packed = packed if self._packed is None else self._packed.copy_(packed)
        self._weight = None

    def plain(self) -> torch.Tensor:
        """Returns a copy of the weights, which `load` and `finish` make the same packed weights of. Not between
        `release` and `finish`."""
        plain: torch.Tensor = self._packed.to_dense()
        return plain

    def release(self) -> int:
        """Drops the packed weights, until all rows are loaded again; returns the number of bytes."""
        packed, self._packed = self._packed, None
        return 0 if packed is None else packed.numel() * packed.element_size()

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x @ weight.T + bias, accumulated in float32."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return output


class TiledLinear(LinearKernel):
    """Calls another kernel on tiles of `TILE_ROWS` rows, the last one padded with zeros, so that a row's result bits
    depend on the row alone: libraries multiply one row, few rows and many rows in different ways.

    The tiled kernel tests whether the other kernel gives the same bits at every row of a tile. Where it does not, rows
    are multiplied one by one, which is slow for prompts.
    """

    def __init__(self, kernel: LinearKernel, in_features: int, like: torch.Tensor):
        self._kernel = kernel
        self._in_features = in_features
        self._like = like.new_empty(0)
        self._tile_rows = TILE_ROWS

    @property
    def kernel(self) -> LinearKernel:
        """The kernel that multiplies the tiles."""
        return self._kernel

    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None:
        """Loads the other kernel."""
        self._kernel.load(rows, weight)

    def finish(self) -> None:
        """Finishes the other kernel, then tests it."""
        self._kernel.finish()
        self._tile_rows = TILE_ROWS if self._treats_places_alike() else 1

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiplies tile by tile."""
        num_rows, size = x.shape[0], self._tile_rows
        if num_rows == size and x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0:
            return self._kernel.apply(x, bias)
        # A tensor of its own, so that tiles lie in memory as they always do: libraries look at that as well.
        padded = x.new_zeros(-(-num_rows // size) * size, x.shape[1])
        padded[:num_rows] = x
        tiles = [self._kernel.apply(padded[start : start + size], bias) for start in range(0, len(padded), size)]
        return torch.cat(tiles)[:num_rows] if tiles else self._kernel.apply(x, bias)

    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors of the other kernel."""
        return self._kernel.tensors()

    def _treats_places_alike(self) -> bool:
        generator = torch.Generator().manual_seed(0)
        tile = torch.randn(TILE_ROWS, self._in_features, generator=generator).to(self._like)
        first = self._kernel.apply(tile, None)[0]
        return all(
            torch.equal(self._kernel.apply(tile.roll(place, 0), None)[place], first) for place in range(1, TILE_ROWS)
        )


def unpacked(weight: torch.Tensor | PackedTensor) -> torch.Tensor:
    """Returns the weight as numbers: a packed one dequantized."""
    return weight.dequantized() if isinstance(weight, PackedTensor) else weight


def packed_kernels(module: torch.nn.Module) -> Iterable[PackedLinear]:
    """Returns the packed kernels of the module itself, tiled ones included."""
    kernels = (value.kernel if isinstance(value, TiledLinear) else value for value in vars(module).values())
    return (kernel for kernel in kernels if isinstance(kernel, PackedLinear))


def is_plain(kernel: LinearKernel) -> bool:
    """Whether a kernel holds weights in full precision, so that it must get them unpacked."""
    return isinstance(kernel.kernel if isinstance(kernel, TiledLinear) else kernel, TorchLinear | PackedLinear)


def share_of(
    kernel: LinearKernel, weight: torch.Tensor | PackedTensor, take: tuple[slice, slice]
) -> torch.Tensor | PackedTensor:
    """Returns rows and columns of `weight` for `kernel`. For plain kernels a packed weight is unpacked first, so that
    columns may cut through its blocks; for other kernels this raises `ModelError`."""
    return (unpacked(weight) if is_plain(kernel) else weight)[take]


def plain_kernel(weight: torch.Tensor, *, batch_invariant: bool = False) -> LinearKernel:
    """Returns a kernel that holds `weight`, or what is loaded into it, in full precision on its device.
    `batch_invariant`: a row's result bits must not depend on the other rows."""
    packs = PackedLinear.serves(weight.device, weight.dtype)
    kernel: LinearKernel = PackedLinear(weight) if packs else TorchLinear(weight)
    return TiledLinear(kernel, weight.shape[1], weight) if batch_invariant else kernel
