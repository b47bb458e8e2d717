"""Device: how a worker's work reaches one device, in which order, and with what memory.

An executor hands it to its workers (`Runtime`), and the worker's step runs through it: everything that touches the
device in a step is handed over with `launch`, in streams, and the host waits for events only. Work is a function that
issues torch operations on tensors that stand still (buffers made once); it may run while it is handed over, or at any
time until an event recorded after it was waited for. So it must not read host memory that changes meanwhile. Within a
stream work runs in the order in which it was handed over; between streams only events order it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Work = Callable[[], None]


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device, those of other processes counted as used."""

    free: int
    total: int


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def wait(self) -> None:
        """The calling thread waits until everything before the point is done. Raises what that work raised."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""


class Graph(ABC):
    """Work that was captured: the same operations on the same memory, issued as one."""

    @abstractmethod
    def replay(self) -> None:
        """Issues the operations again, in the current stream. To be called inside launched work."""


class Stream:
    """An order of work beside the main one. Made by `Device.create_stream`; it has no methods of its own."""


class Device(ABC):
    """One device of one worker. Not thread-safe: the worker's thread calls it."""

    torch_device: torch.device

    @abstractmethod
    def launch(self, work: Work, *, stream: Stream | None = None, after: Sequence[Event] = ()) -> None:
        """Hands over work to `stream` (None: the main one), which first waits for `after`; the host does not.

        Raises what the work raises while it is issued, `torch.OutOfMemoryError` among it; what it raises later, the
        next `wait` raises.
        """

    @abstractmethod
    def record(self, stream: Stream | None = None) -> Event:
        """The point behind everything that was handed to the stream."""

    @abstractmethod
    def create_stream(self) -> Stream:
        """A further stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all streams."""

    @abstractmethod
    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory from and to which copies need not stop the host (pinned, where that makes a
        difference). Inside work, copy with `non_blocking=True`."""

    @abstractmethod
    def capture(self, work: Work) -> Graph:
        """Captures the operations of `work`, which was run once before, without running them. Raises `CapacityError`
        without memory for it, and whatever torch raises for work that synchronises or reads host memory."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Free and total memory now. What a caching allocator keeps for itself counts as used."""

    @abstractmethod
    def measure(self, work: Work) -> int:
        """Runs `work` to its end and returns how many bytes more than before were held at its peak."""

    @abstractmethod
    def release_unused(self) -> None:
        """Gives memory that a caching allocator keeps, and nothing uses, back to the device."""


@dataclass(frozen=True)
class Runtime:
    """How a worker should drive its device: the executor's choice. Pickles, so `create_device` is a class or a
    module's function."""

    create_device: Callable[[str], Device]
    """From `Placement.device` to the device, called in the worker's process before weights are read."""
    graphs: Literal["auto", "off"] | tuple[int, ...] = "auto"
    """Batch sizes (requests) at which decode and verify steps are captured. "auto": a ladder of sizes, or none, with a
    warning, where the attention backend or the model cannot be captured; sizes that were given refuse instead."""
    compile_mode: str | None = None
    """Mode of `torch.compile` for the model's forward pass; None: not compiled."""
