"""The null device: runs the whole host path of the GPU executor on a CPU, with streams whose work is deferred."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from dovetail.contracts.device import Device, DeviceMemory, Event, Graph, Stream, Work
from dovetail.executors.gpu.capture import CaptureError, capture

Order = Literal["at once", "late", "early"]
"""When launched work runs.

"late": when the host or another stream waits for an event after it, as on a device that is far behind the host.
"early": likewise in the main stream, but in other streams as soon as the events they wait for are done. A missing wait
gives wrong tokens in at least one of the two. "at once": when it is launched.
"""


@dataclass(frozen=True)
class _Item:
    work: Work
    after: tuple[HostEvent, ...]


class HostStream(Stream):
    """Work in order, done up to some point."""

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()
        self._num_done = 0
        self._error: Exception | None = None

    @property
    def num_handed_over(self) -> int:
        """Number of launched items, done or not."""
        return self._num_done + len(self._items)

    @property
    def num_done(self) -> int:
        """Number of items that are done."""
        return self._num_done

    def add(self, item: _Item) -> None:
        """Appends an item."""
        self._items.append(item)

    def run_until(self, count: int) -> None:
        """Runs the first `count` items, and what they wait for. Raises the first error of this stream since the last
        call; later items run nevertheless, as on a device."""
        while self._num_done < count:
            item = self._items.popleft()
            self._num_done += 1
            try:
                for event in item.after:
                    event.wait()
                item.work()
            except Exception as error:
                self._error = self._error or error
        if self._error is not None:
            first, self._error = self._error, None
            raise first


class HostEvent(Event):
    """A point in a `HostStream`."""

    def __init__(self, stream: HostStream):
        self._stream = stream
        self._count = stream.num_handed_over

    def wait(self) -> None:
        """Runs the work before the point."""
        self._stream.run_until(self._count)

    def is_done(self) -> bool:
        """Whether the work before the point is done."""
        return self._stream.num_done >= self._count


class HostDevice(Device):
    """The CPU as a device with streams."""

    def __init__(self, name: str, order: Order = "at once"):
        self.torch_device = torch.device(name)
        self._order = order
        self._main = HostStream()
        self._streams = [self._main]
        self._is_capturing = False
        self.num_waits = 0
        """How often the host waited, for an event or for everything: what a step costs in synchronisation."""

    def launch(self, work: Work, *, stream: Stream | None = None, after: Sequence[Event] = ()) -> None:
        """Runs or defers the work, as `Order` says."""
        target = self._stream(stream)
        events = tuple(event for event in after if isinstance(event, HostEvent))
        target.add(_Item(work, events))
        if self._order == "at once" or (self._order == "early" and target is not self._main):
            target.run_until(target.num_handed_over)

    def record(self, stream: Stream | None = None) -> Event:
        """Records an event that counts its waits."""
        return _CountedEvent(self, self._stream(stream))

    def create_stream(self) -> Stream:
        """Creates a stream."""
        self._streams.append(HostStream())
        return self._streams[-1]

    def synchronize(self) -> None:
        """Runs all launched work."""
        self.note_wait()
        if any(stream.num_done < stream.num_handed_over for stream in self._streams):
            self.num_waits += 1
        for stream in self._streams:
            stream.run_until(stream.num_handed_over)

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns ordinary memory."""
        return torch.zeros(*shape, dtype=dtype)

    def capture(self, work: Work) -> Graph:
        """Records the operations of the work. Raises `CaptureError` for what no CUDA capture holds, waiting for a
        stream among it."""
        self._is_capturing = True
        try:
            return capture(work)
        finally:
            self._is_capturing = False

    def memory(self) -> DeviceMemory:
        """Memory of the machine."""
        memory = psutil.virtual_memory()
        return DeviceMemory(memory.available, memory.total)

    def measure(self, work: Work) -> int:
        """Measures by the resident set of this process, which never falls below what was touched."""
        process = psutil.Process(os.getpid())
        before = process.memory_info().rss
        work()
        return max(0, process.memory_info().rss - before)

    def release_unused(self) -> None:
        """Does nothing: this device keeps no unused memory."""
        return None

    def note_wait(self) -> None:
        """Raises `CaptureError` while work is captured."""
        if self._is_capturing:
            raise CaptureError("the host waits for the device inside captured work")

    def _stream(self, stream: Stream | None) -> HostStream:
        if stream is None:
            return self._main
        if not isinstance(stream, HostStream):
            raise TypeError(f"a {type(stream).__name__} is no stream of this device")
        return stream


class _CountedEvent(HostEvent):
    def __init__(self, device: HostDevice, stream: HostStream):
        super().__init__(stream)
        self._device = device

    def wait(self) -> None:
        self._device.note_wait()
        if not self.is_done():
            self._device.num_waits += 1
        super().wait()


def at_once(name: str) -> Device:
    """Returns a device that runs work when it is launched."""
    return HostDevice(name)


def late(name: str) -> Device:
    """Returns a device that runs work as late as possible."""
    return HostDevice(name, "late")


def early(name: str) -> Device:
    """Returns a device that runs work of side streams as early as possible."""
    return HostDevice(name, "early")
