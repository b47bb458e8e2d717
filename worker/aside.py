"""Where the content of memory is while a worker sleeps."""

from __future__ import annotations

import ctypes
import tempfile
import weakref
from abc import ABC, abstractmethod

import torch

from dovetail.contracts.device import Device
from dovetail.contracts.errors import CapacityError


class Aside(ABC):
    """Contents, in the order in which they came. They stay until `close`."""

    @abstractmethod
    def keep(self, content: torch.Tensor) -> int:
        """Copies uint8 [n]; returns the number under which `fill` has it. Raises `CapacityError` where it does not
        fit."""

    @abstractmethod
    def fill(self, number: int, target: torch.Tensor) -> None:
        """Copies what `keep` numbered into uint8 [n]."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of everything. Idempotent."""


class HostAside(Aside):
    """In host memory, for accelerators. Not run on a GPU yet."""

    def __init__(self, device: Device):
        self._device = device
        self._copies: list[torch.Tensor] = []

    def keep(self, content: torch.Tensor) -> int:
        copy = self._device.host_buffer(len(content), dtype=torch.uint8)
        copy.copy_(content)
        self._copies.append(copy)
        return len(self._copies) - 1

    def fill(self, number: int, target: torch.Tensor) -> None:
        target.copy_(self._copies[number])

    def close(self) -> None:
        self._copies.clear()


class FileAside(Aside):
    """In a file without a name, in the folder for temporary files: on a CPU a copy in memory would give nothing back.
    The file ends with the process, however that ends."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="dovetail-asleep-", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._close = weakref.finalize(self, self._file.close)
        self._ranges: list[tuple[int, int]] = []

    def keep(self, content: torch.Tensor) -> int:
        start = sum(self._ranges[-1]) if self._ranges else 0
        data = _memory(content)
        written = 0
        try:
            self._file.seek(start)
            while written < len(data):
                written += self._file.write(data[written:]) or 0
        except OSError as error:
            raise CapacityError(
                f"the weights cannot be set aside in a file in {tempfile.gettempdir()} ({error}): free space there, set"
                " TMPDIR to a folder that has it, or sleep at level 2, which reads weights again"
            ) from error
        self._ranges.append((start, len(data)))
        return len(self._ranges) - 1

    def fill(self, number: int, target: torch.Tensor) -> None:
        start, _ = self._ranges[number]
        data = _memory(target)
        self._file.seek(start)
        done = 0
        while done < len(data):
            count = self._file.readinto(data[done:])
            if not count:
                raise OSError("the file with the weights of a sleeping worker is shorter than what was written")
            done += count

    def close(self) -> None:
        self._close()


def create_aside(device: Device) -> Aside:
    """Where a worker on this device keeps what it wants again."""
    return FileAside() if device.torch_device.type == "cpu" else HostAside(device)


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a uint8 tensor on the CPU. `numpy()` has them too, but keeps its storage from being resized."""
    return memoryview((ctypes.c_ubyte * len(tensor)).from_address(tensor.data_ptr())).cast("B")
