"""The device of a worker whose executor brings none: all work runs at once, in the order in which it arrives."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.contracts.device import Device, DeviceMemory, Event, Graph, Stream, Work
from dovetail.contracts.errors import CapacityError, ConfigError


class _Done(Event):
    """A point in the work of a CPU, which is done when it is handed over."""

    def wait(self) -> None:
        """Returns at once."""
        return None

    def is_done(self) -> bool:
        """True."""
        return True


class _Recorded(Event):
    """A point in the current stream of an accelerator, which may still compute."""

    def __init__(self, device: torch.device):
        self._event = torch.Event(device)
        self._event.record()

    def wait(self) -> None:
        """Waits for the work before the point."""
        self._event.synchronize()

    def is_done(self) -> bool:
        """Asks the driver, without waiting."""
        return bool(self._event.query())


class _OneStream(Stream):
    """The main stream by another name."""


class PlainDevice(Device):
    """Any torch device, with one stream and without graphs."""

    def __init__(self, name: str):
        self.torch_device = torch.device(name)
        if self.torch_device.type == "cuda" and self.torch_device.index is not None:
            # Triton and NCCL go by the current device, whatever the tensors' is.
            torch.cuda.set_device(self.torch_device)

    def launch(self, work: Work, *, stream: Stream | None = None, after: Sequence[Event] = ()) -> None:
        """Runs the work before it returns."""
        work()

    def record(self, stream: Stream | None = None) -> Event:
        """Everything that was handed over so far."""
        return _Done() if self.torch_device.type == "cpu" else _Recorded(self.torch_device)

    def create_stream(self) -> Stream:
        """The main stream: this device has no other."""
        return _OneStream()

    def synchronize(self) -> None:
        """Waits for the whole device."""
        if self.torch_device.type != "cpu":
            torch.accelerator.synchronize(self.torch_device)

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Pinned if the device is a GPU."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=self.torch_device.type == "cuda")

    def capture(self, work: Work) -> Graph:
        """Raises `ConfigError`."""
        raise ConfigError("this executor captures no graphs; choose executor gpu")

    def memory(self) -> DeviceMemory:
        """What the driver says; a CPU's memory is the config's to give."""
        if self.torch_device.type != "cuda":
            raise CapacityError(f"{self.torch_device} does not tell its memory; give cache.memory_gib")
        return DeviceMemory(*torch.cuda.mem_get_info(self.torch_device))

    def measure(self, work: Work) -> int:
        """By torch's allocator, on CUDA; elsewhere 0, since nobody counts."""
        if self.torch_device.type != "cuda":
            work()
            return 0
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.torch_device) - before

    def release_unused(self) -> None:
        """Empties torch's cache."""
        if self.torch_device.type == "cuda":
            torch.cuda.empty_cache()
