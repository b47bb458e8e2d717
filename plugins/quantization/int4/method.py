"""The `int4` method: holds the weights of AWQ and GPTQ checkpoints, rearranged but not rounded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.kv import DTYPE_BYTES
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.quantization import (
    LayerSupport,
    LinearKernel,
    LinearShape,
    QuantizationCapabilities,
    QuantizationMethod,
    QuantizationNeed,
)
from dovetail.contracts.weights import PackedTensor
from dovetail.nn.triton_check import reasons_against_triton
from dovetail.nn.triton_launch import FP_FUSION
from dovetail.plugins.quantization.parts import add_up, cut

GROUP_SIZES = (32, 64, 128, 256)
_HEADER = 4
_ROWS_AT_ONCE = 1024
"""Output features that are rearranged at a time, or written out where that is done for each call."""
_NEIGHBOURS = 32
"""Weights of 16 bytes: the first half of them in low nibbles, the second in high ones."""


_FORMATS = {f"int4g{size}": 0.5 + _HEADER / size for size in GROUP_SIZES}
"""Formats that are held as they are, and bytes of a weight in each."""


class Int4Method(QuantizationMethod):
    """Four bits a weight, in groups with scale and zero point each."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    stability = "experimental"
    preference: ClassVar[int] = 0
    capabilities = QuantizationCapabilities(
        device_types=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        packed_formats=frozenset(_FORMATS),
        reloads_rows=True,
        graph_capture=True,
    )

    @classmethod
    def check(cls, need: QuantizationNeed, options: PluginOptions, environment: Environment) -> list[str]:
        """A checkpoint in such groups; on a GPU Triton."""
        if not need.packed_formats & cls.capabilities.packed_formats:
            found = ", ".join(sorted(need.packed_formats)) or "not packed"
            return [f"int4 holds AWQ and GPTQ weights in groups of {GROUP_SIZES}; the checkpoint's are {found}"]
        return reasons_against_triton(environment) if need.device_type == "cuda" else []

    def describe(self, shape: LinearShape) -> LayerSupport:
        """Every layer; parts that the checkpoint does not pack stay numbers. Weights are read as they are by the kernel
        for GPUs, and written out for each call on CPUs."""
        return LayerSupport(
            is_served=True,
            bytes_per_weight=DTYPE_BYTES[self.need.dtype],
            packed_bytes_per_weight=_FORMATS,
            reads_once=self.need.device_type == "cuda",
        )

    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel:
        """For packed parts and numbers side by side."""
        return Int4Linear(shape, device, getattr(torch, self.need.dtype))


class Int4Linear(LinearKernel):
    """One linear layer. Its parts, which were packed in one way each, follow each other."""

    def __init__(self, shape: LinearShape, device: torch.device, dtype: torch.dtype):
        self._shape = shape
        self._device = device
        self._dtype = dtype
        self._given: dict[int, _Part] = {}
        """Parts of the first round, by their first row."""
        self._parts: dict[int, _Part] = {}
        """All rows from the first `finish` on, by their first row in ascending order. They keep their memory."""

    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None:
        """Takes a part; after the first round, rows of one or several."""
        if not self._parts:
            self._given[rows.start] = self._part_of(weight)
            return
        for first, part in self._parts.items():
            start, stop = max(rows.start, first), min(rows.stop, first + len(part))
            if start < stop:
                new = self._part_of(weight[start - rows.start : stop - rows.start])
                if not part.takes(new):
                    raise ModelError(
                        f"{self._shape.name}: rows {start} to {stop - 1} are held as {part}, and come as {new} now; "
                        "loaded layers keep their memory: start another engine with these weights"
                    )
                part.write(start - first, new)

    def finish(self) -> None:
        """After the first round: joins neighbours of one group size, so that they are one launch."""
        if self._parts:
            return
        last: _Part | None = None
        for first, part in sorted(self._given.items()):
            if isinstance(part, _Packed) and isinstance(last, _Packed) and last.takes(part):
                last.join(part)
            else:
                self._parts[first] = last = part
        self._given = {}

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The parts side by side."""
        parts = [part.apply(x) for part in self._parts.values()]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return y if bias is None else y + bias

    def tensors(self) -> list[torch.Tensor]:
        """Returns the tensors of every part."""
        return [tensor for part in self._parts.values() for tensor in part.tensors()]

    def _part_of(self, weight: torch.Tensor | PackedTensor) -> _Part:
        if isinstance(weight, PackedTensor):
            return _Packed.of(weight, self._device)
        return _Plain(weight.to(self._device, self._dtype, copy=True))


class _Part(ABC):
    """Some rows of a layer, in one form."""

    @abstractmethod
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in_features] -> [T, rows]."""

    @abstractmethod
    def takes(self, other: _Part) -> bool:
        """Whether rows of `other` have the same form."""

    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What it holds; the first is as long as it has rows."""

    def __len__(self) -> int:
        return len(self.tensors()[0])

    def write(self, first: int, other: _Part) -> None:
        """The rows of `other` in place of those from `first` on, in the same memory."""
        for own, new in zip(self.tensors(), other.tensors(), strict=True):
            own[first : first + len(new)].copy_(new)


class _Plain(_Part):
    """A part in full precision."""

    def __init__(self, weight: torch.Tensor):
        self._weight = weight

    def __str__(self) -> str:
        return "numbers"

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self._weight)

    def takes(self, other: _Part) -> bool:
        return isinstance(other, _Plain)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self._weight,)


class _Packed(_Part):
    """A part in groups: nibbles uint8 [rows, columns / 2] as `in_halves` arranges them, scales and zero points float16
    [groups, rows], so that those of one group are neighbours."""

    def __init__(self, nibbles: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_size: int):
        self.group_size = group_size
        self._nibbles = nibbles
        self._scales = scales
        self._zeros = zeros

    def __str__(self) -> str:
        return f"four bits in groups of {self.group_size}"

    @classmethod
    def of(cls, weight: PackedTensor, device: torch.device) -> _Packed:
        rows, size = weight.shape[0], weight.block_size
        blocks = weight.blocks.reshape(rows, -1, weight.block_bytes)
        header = blocks[..., :_HEADER].contiguous().view(torch.float16)
        # Copies in any case: what is handed in may be a file's memory, and what is held is written to later.
        scales, zeros = (_copied(header[..., index].t()).to(device) for index in (0, 1))
        nibbles = torch.empty(rows, weight.shape[1] // 2, dtype=torch.uint8, device=device)
        for start in range(0, rows, _ROWS_AT_ONCE):
            piece = in_halves(blocks[start : start + _ROWS_AT_ONCE, :, _HEADER:].to(device))
            nibbles[start : start + len(piece)] = piece.flatten(1)
        return cls(nibbles, scales, zeros, size)

    def takes(self, other: _Part) -> bool:
        return isinstance(other, _Packed) and other.group_size == self.group_size

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self._nibbles, self._scales, self._zeros)

    def write(self, first: int, other: _Part) -> None:
        nibbles, *sides = other.tensors()
        self._nibbles[first : first + len(nibbles)].copy_(nibbles)
        for own, new in zip((self._scales, self._zeros), sides, strict=True):
            own[:, first : first + len(nibbles)].copy_(new)

    def join(self, other: _Packed) -> None:
        """Takes the rows of `other` in behind its own."""
        self._nibbles = torch.cat((self._nibbles, other._nibbles))
        self._scales = torch.cat((self._scales, other._scales), dim=1)
        self._zeros = torch.cat((self._zeros, other._zeros), dim=1)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cuda":
            return self.multiplied(x)
        # In pieces that a CPU's caches hold, and for the memory's sake: on the way they are float32.
        starts = range(0, len(self._nibbles), _ROWS_AT_ONCE)
        pieces = (self.written_out(start, start + _ROWS_AT_ONCE, x.dtype) for start in starts)
        return torch.cat([torch.nn.functional.linear(x, piece) for piece in pieces], dim=-1)

    def multiplied(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies with the Triton kernel: one launch, or two where the sum is cut into parts."""
        from dovetail.plugins.quantization.int4.kernels import int4_linear_kernel

        x = x.contiguous()
        (num_rows, in_features), out_features = x.shape, len(self._nibbles)
        out = x.new_empty(num_rows, out_features)
        if not num_rows:
            return out
        sizes = tile_sizes(num_rows, self.group_size, x.element_size())
        num_tiles = -(-out_features // sizes["COLUMNS"]), -(-num_rows // sizes["ROWS"])
        num_parts, part_size = cut(num_tiles[0] * num_tiles[1], num_rows, in_features, sizes["DEPTH"], self.group_size)
        sums = out if num_parts == 1 else x.new_empty(num_parts, *out.shape, dtype=torch.float32)
        weights = self._nibbles, self._scales, self._zeros
        features = num_rows, in_features, out_features, part_size
        int4_linear_kernel[(*num_tiles, num_parts)](sums, x, *weights, *features, **sizes, **FP_FUSION)
        if num_parts > 1:
            add_up(out, sums)
        return out

    def written_out(self, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Rows start .. stop - 1 as numbers."""
        nibbles = self._nibbles[start:stop]
        halves = nibbles.view(len(nibbles), -1, _NEIGHBOURS // 2)
        weights = torch.cat((halves & 15, halves >> 4), dim=-1).view(len(nibbles), -1, self.group_size)
        scales, zeros = (side.t()[start:stop, :, None].float() for side in (self._scales, self._zeros))
        return ((weights - zeros) * scales).view(len(nibbles), -1).to(dtype)


def in_halves(neighbours: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, ..., bytes], neighbours in low and high nibble, to bytes of which 16 have the first 16 of 32 weights
    in their low nibbles and the others in the high ones."""
    weights = torch.stack((neighbours & 15, neighbours >> 4), dim=-1).view(-1, 2, _NEIGHBOURS // 2)
    return (weights[:, 0] | weights[:, 1] << 4).view(neighbours.shape)


def tile_sizes(num_rows: int, group_size: int, element_size: int) -> dict[str, int]:
    """Constants of `int4_linear_kernel`: the lowest tiles that hold all tokens, so that weights are read once, or the
    highest."""
    if element_size == 4:  # without matrix units
        rows = _first(num_rows, (16, 64))
        sizes = {"ROWS": rows, "COLUMNS": 64, "DEPTH": min(group_size, 64), "num_warps": 8, "num_stages": 2}
    else:
        rows = _first(num_rows, (16, 32, 64, 128))
        few = rows <= 32
        sizes = {"ROWS": rows, "COLUMNS": 128, "DEPTH": min(group_size, 64 if rows == 128 else 128)}
        sizes |= {"num_warps": 4 if few else 8, "num_stages": 4 if few else 3}
    return sizes | {"GROUP": group_size}


def _first(number: int, sizes: tuple[int, ...]) -> int:
    """The first of `sizes` that holds `number`, or the last."""
    return next((size for size in sizes if number <= size), sizes[-1])


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
