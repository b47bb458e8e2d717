"""Memory behind tensors that can be given back and comes again. The tensors stay the same objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch

from dovetail.contracts.quantization import LinearKernel
from dovetail.worker.machine.free_memory import give_back_pages

_PADDING = 64
"""Most bytes between tensors that were cut from one memory, for their alignment."""


class Piece(ABC):
    """One stretch of memory."""

    num_bytes: int

    @abstractmethod
    def content(self) -> torch.Tensor:
        """uint8 [num_bytes]: the memory itself. Not while it is given back."""

    @abstractmethod
    def give_back(self) -> int:
        """Gives the memory back; how many bytes that frees. The content is lost."""

    @abstractmethod
    def take(self) -> None:
        """Takes memory again, if it is not there. Its content is undefined."""

    @abstractmethod
    def clear(self) -> None:
        """Makes the content zero, or leaves what was there where nothing was given back."""


class ResizedPiece(Piece):
    """A storage of torch. It may get another address."""

    def __init__(self, storage: torch.UntypedStorage):
        self._storage = storage
        self.num_bytes = storage.nbytes()

    def content(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)

    def give_back(self) -> int:
        self._storage.resize_(0)
        return self.num_bytes

    def take(self) -> None:
        self._storage.resize_(self.num_bytes)

    def clear(self) -> None:
        self.content().zero_()


class FixedPiece(Piece):
    """Host memory that keeps its address, since kernels hold it. Its whole pages go back to the system, on Linux; they
    are there again, with zeros or what a mapped file has, when they are next touched."""

    def __init__(self, content: torch.Tensor):
        self._content = content
        self.num_bytes = len(content)

    def content(self) -> torch.Tensor:
        return self._content

    def give_back(self) -> int:
        return give_back_pages(self._content.data_ptr(), self.num_bytes)

    def take(self) -> None:
        return None

    def clear(self) -> None:
        return None


def pieces_of(tensors: Iterable[torch.Tensor]) -> dict[int, Piece]:
    """The distinct pieces behind tensors, by address."""
    found: dict[int, Piece] = {}
    fixed: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_meta:
            continue  # oneDNN's own, see packed_kernels
        storage = tensor.untyped_storage()
        if not storage.nbytes() or not tensor.numel():
            continue
        if storage.resizable():
            found[storage.data_ptr()] = ResizedPiece(storage)
        elif storage.device.type == "cpu":
            fixed.setdefault(storage.data_ptr(), []).append(tensor)
    for start, sharing in fixed.items():
        whole = torch.empty(0, dtype=torch.uint8).set_(sharing[0].untyped_storage())
        for first, last in _stretches(sharing):
            found[first] = FixedPiece(whole[first - start : last - start])
    return found


def module_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors of a module and those within it: parameters, buffers, attributes, and those of kernels."""
    for each in module.modules():
        yield from kernel_tensors(each)
        yield from each.parameters(recurse=False)
        yield from each.buffers(recurse=False)


def kernel_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that are attributes of a module itself, and those of its kernels."""
    for value in vars(module).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, LinearKernel):
            yield from value.tensors()


def _stretches(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """First and last address (exclusive) of what tensors of one storage take; neighbours are one stretch."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(map(_addresses, tensors)):
        if merged and first <= merged[-1][1] + _PADDING:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()
