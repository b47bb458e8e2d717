"""What the programs of one launch do to memory: each tensor of the launch gets addresses of its own, far from all
others, so that an address says which tensor it was computed from."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import triton

_SPACE_BITS = 44
"""Of the addresses of one tensor."""
_FIRST_SPACE = 16
"""Below it are real addresses, which kernels may find in tables of pointers."""
_ALIGNMENT = 1 << 16
"""Up to which the new address is aligned as the real one is."""
_TRITON = str(Path(triton.__file__).parent)
_HERE = str(Path(__file__).parent)
_MANY = -1

Program = tuple[int, int, int]


class KernelFault(AssertionError):
    """What no program of a launch may do: see `checked_kernels`."""


@dataclass(frozen=True)
class _Tensor:
    name: str
    first: int
    """Address of its first element."""
    end: int
    """Behind its last element."""
    base: int
    """What the kernel is given for `first`."""


@dataclass
class _Region:
    """Memory that tensors of the launch share, and who touched it: 0 nobody, a program's number, or -1 several."""

    first: int
    end: int
    granule: int = 1
    readers: np.ndarray = field(init=False)
    writers: np.ndarray = field(init=False)
    atomics: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        # Zeros that nobody looks at take no memory.
        self.readers, self.writers, self.atomics = (np.zeros(self._cells, dtype=np.int32) for _ in range(3))

    @property
    def _cells(self) -> int:
        return -(-(self.end - self.first) // self.granule)

    def cells(self, places: np.ndarray, size: int) -> np.ndarray:
        """Indices of the cells that elements of `size` bytes at `places` (from the region's begin) lie in."""
        if size < self.granule:
            again = self.granule // size
            self.granule = size
            cut = slice(0, self._cells)
            self.readers, self.writers, self.atomics = (
                np.repeat(cells, again)[cut] for cells in (self.readers, self.writers, self.atomics)
            )
        first = places // self.granule
        count = size // self.granule
        return first if count == 1 else (first[:, None] + np.arange(count)).ravel()


class LaunchMemory:
    """The tensors of one launch of `kernel`, by the names of its parameters.

    `program` is who runs, to be set; `dumps` is what several may write to. `real_addresses` raises `KernelFault`.
    """

    def __init__(self, kernel: str, tensors: Mapping[str, torch.Tensor], dumps: Sequence[torch.Tensor] = ()):
        self._kernel = kernel
        self.program: Program = (0, 0, 0)
        self.accesses = 0
        self._numbers: dict[Program, int] = {}
        self._dumps = [_placed(0, "", tensor) for tensor in dumps]
        self._tensors = [_placed(index, name, tensor) for index, (name, tensor) in enumerate(tensors.items())]
        self._regions = _merged(self._tensors, [tensor.element_size() for tensor in tensors.values()])
        self._bases = {tensor.name: tensor.base for tensor in self._tensors}

    def base(self, name: str) -> int:
        """The address that the kernel is given for the tensor."""
        return self._bases[name]

    def real_addresses(self, kind: str, addresses: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
        """Real addresses of elements of `size` bytes, of which those in `mask` are touched; the others' are 0.

        `kind` is "load", "store" or "atomic".
        """
        mask = np.broadcast_to(mask, addresses.shape)
        real = np.zeros(addresses.shape, dtype=np.uint64)
        touched = addresses[mask].astype(np.uint64)
        if touched.size:
            real[mask] = self._checked(kind, touched, size)
        return real

    def _checked(self, kind: str, addresses: np.ndarray, size: int) -> np.ndarray:
        self.accesses += addresses.size
        spaces = (addresses >> np.uint64(_SPACE_BITS)).astype(np.int64)
        real = np.empty_like(addresses)
        for space in np.unique(spaces).tolist():
            chosen = spaces == space
            if space < _FIRST_SPACE:
                for place in np.flatnonzero(chosen).tolist():
                    real[place] = self._of_tensor(kind, *self._found(kind, int(addresses[place])), size)[0]
            else:
                tensor = self._tensors[min(space - _FIRST_SPACE, len(self._tensors) - 1)]
                real[chosen] = self._of_tensor(kind, tensor, addresses[chosen].astype(np.int64) - tensor.base, size)
        return real

    def _found(self, kind: str, address: int) -> tuple[_Tensor, np.ndarray]:
        """The tensor at a real address, and the offset in it."""
        for tensor in self._tensors:
            if tensor.first <= address < tensor.end:
                return tensor, np.array([address - tensor.first])
        raise KernelFault(f"{self._told(kind)} at {address:#x}, where no tensor of the launch is")

    def _of_tensor(self, kind: str, tensor: _Tensor, offsets: np.ndarray, size: int) -> np.ndarray:
        length = tensor.end - tensor.first
        outside = (offsets < 0) | (offsets + size > length)
        if outside.any():
            self._refuse(kind, tensor, offsets[outside], f"outside of its {length} bytes")
        real = offsets + tensor.first
        crooked = real % size != 0
        if crooked.any():
            self._refuse(kind, tensor, offsets[crooked], f"not aligned to the element's {size} bytes")
        self._note(kind, tensor, real, size)
        return real.astype(np.uint64)

    def _note(self, kind: str, tensor: _Tensor, real: np.ndarray, size: int) -> None:
        """Writes down who touched what, and refuses what another program touched in a way that does not go with it."""
        me = self._numbers.setdefault(self.program, len(self._numbers) + 1)
        if kind == "store":
            for dump in self._dumps:
                real = real[(real < dump.first) | (real >= dump.end)]
        region = next(region for region in self._regions if region.first <= tensor.first < region.end)
        cells = region.cells(real - region.first, size)
        marks = {"load": region.readers, "store": region.writers, "atomic": region.atomics}
        rivals = {"load": ("store", "atomic"), "store": ("load", "store", "atomic"), "atomic": ("load", "store")}
        for rival in rivals[kind]:
            others = marks[rival][cells]
            clash = (others != 0) & (others != me)
            if clash.any():
                place = int(cells[clash][0])
                clash_text = f"which program {self._name(int(others[clash][0]))} touched by a {rival}"
                offset = np.array([place * region.granule + region.first - tensor.first])
                self._refuse(kind, tensor, offset, f"{clash_text}: programs of a launch run in any order")
        before = marks[kind][cells]
        marks[kind][cells] = np.where((before == 0) | (before == me), me, _MANY)

    def _name(self, number: int) -> str:
        if number == _MANY:
            return "(several)"
        return str(next(program for program, known in self._numbers.items() if known == number))

    def _refuse(self, kind: str, tensor: _Tensor, offsets: np.ndarray, why: str) -> None:
        some = f"byte {int(offsets.flat[0])}" + (f" and {offsets.size - 1} more" if offsets.size > 1 else "")
        raise KernelFault(f"{self._told(kind)} at {some} of `{tensor.name}`, {why}")

    def _told(self, kind: str) -> str:
        return f"kernel {self._kernel}, program {self.program}, {_line()}: {kind}"


def _placed(index: int, name: str, tensor: torch.Tensor) -> _Tensor:
    first = tensor.data_ptr()
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = first + (elements * tensor.element_size() if tensor.numel() else 0)
    # In the middle of a space of its own: an address may lie far below, and is found to belong here.
    space = (_FIRST_SPACE + index) << _SPACE_BITS
    return _Tensor(name, first, end, space + (1 << (_SPACE_BITS - 1)) + first % _ALIGNMENT)


def _merged(tensors: list[_Tensor], sizes: list[int]) -> list[_Region]:
    """One region for tensors that overlap, with cells of the smallest element."""
    regions: list[_Region] = []
    for tensor, size in sorted(zip(tensors, sizes, strict=True), key=lambda pair: pair[0].first):
        if regions and tensor.first < regions[-1].end:
            last = regions.pop()
            regions.append(_Region(last.first, max(last.end, tensor.end), min(last.granule, size)))
        elif tensor.end > tensor.first:
            regions.append(_Region(tensor.first, tensor.end, size))
    return regions


def _line() -> str:
    """Of the kernel, or of the function that it calls."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TRITON, _HERE)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
