"""The `gpu` executor with a clock: when the device began and ended each step, and so the gaps between them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.contracts.device import Device, Event, Stream, Work
from dovetail.contracts.executor import Placement
from dovetail.executors.gpu.executor import GPUExecutor

_devices: list[TimedDevice] = []
"""Devices are made by the worker, from a class; this is how the executor finds its own."""


class TimedDevice(Device):
    """Another device, whose main stream's work is timed."""

    def __init__(self, device: Device):
        self.torch_device = device.torch_device
        self._device = device
        self.marks: list[tuple[Any, Any]] = []
        """Begin and end of each piece of work."""
        _devices.append(self)

    def launch(self, work: Work, *, stream: Stream | None = None, after: Sequence[Event] = ()) -> None:
        """Marks begin and end."""
        if stream is not None:
            return self._device.launch(work, stream=stream, after=after)

        def timed() -> None:
            begin = self._mark()
            work()
            self.marks.append((begin, self._mark()))

        return self._device.launch(timed, after=after)

    def gaps(self) -> list[float]:
        """Seconds between the end of each piece of work and the beginning of the next. Waits for the device."""
        self._device.synchronize()
        return [self._seconds(end, begin) for (_, end), (begin, _) in zip(self.marks[:-1], self.marks[1:], strict=True)]

    def busy(self) -> list[float]:
        """Seconds of each piece of work."""
        self._device.synchronize()
        return [self._seconds(begin, end) for begin, end in self.marks]

    def record(self, stream: Stream | None = None) -> Event:
        """As the device does."""
        return self._device.record(stream)

    def create_stream(self) -> Stream:
        """As the device does."""
        return self._device.create_stream()

    def synchronize(self) -> None:
        """As the device does."""
        self._device.synchronize()

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """As the device does."""
        return self._device.host_buffer(*shape, dtype=dtype)

    def capture(self, work: Work) -> Any:
        """As the device does."""
        return self._device.capture(work)

    def memory(self) -> Any:
        """As the device does."""
        return self._device.memory()

    def measure(self, work: Work) -> int:
        """As the device does."""
        return self._device.measure(work)

    def release_unused(self) -> None:
        """As the device does."""
        self._device.release_unused()

    def _mark(self) -> Any:
        if self.torch_device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        if isinstance(begin, float):
            return float(end - begin)
        return float(begin.elapsed_time(end)) / 1e3


@dataclasses.dataclass(frozen=True)
class _Timed:
    """Makes a timed device of what another class makes."""

    create: Any

    def __call__(self, name: str) -> Device:
        return TimedDevice(self.create(name))


class TimedExecutor(GPUExecutor):
    """`gpu`, with a clock."""

    def _placement(self) -> Placement:
        placement = super()._placement()
        assert placement.runtime is not None
        runtime = dataclasses.replace(placement.runtime, create_device=_Timed(placement.runtime.create_device))
        return dataclasses.replace(placement, runtime=runtime)

    @property
    def clock(self) -> TimedDevice:
        """The worker's device."""
        return _devices[-1]
