"""Device: how a worker hands work to one device, in which order, and with what memory.

An executor gives its workers a device (`Runtime`). A worker hands everything that touches the device in a step to
`launch`, in streams, and the host waits for events only. Work is a function that issues torch operations on tensors
whose addresses do not change (buffers made once). It may run during `launch`, or at any time until the worker has
waited for an event that was recorded after it. So it must not read host memory that changes meanwhile. Within a stream
work runs in the order in which it was launched; between streams only events order it.
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
    """Memory of one device in bytes. What other processes hold counts as used."""

    free: int
    total: int


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the calling thread until all work before the point is done. Raises what that work raised."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether all work before the point is done, so that `wait` returns at once."""


class Graph(ABC):
    """Captured work: the same operations on the same memory, issued as one."""

    @abstractmethod
    def replay(self) -> None:
        """Issues the operations again, in the current stream. Call it inside launched work."""


class Stream:
    """A stream of work that runs parallel to the main one. `Device.create_stream` makes it; it has no methods."""


class Device(ABC):
    """One device of one worker. Not thread-safe: the worker's thread calls it."""

    torch_device: torch.device

    @abstractmethod
    def launch(self, work: Work, *, stream: Stream | None = None, after: Sequence[Event] = ()) -> None:
        """Hands work to `stream` (None: the main one). The stream first waits for `after`; the host does not wait.

        Raises what the work raises while it is issued, `torch.OutOfMemoryError` included. What the work raises later,
        the next `wait` raises.
        """

    @abstractmethod
    def record(self, stream: Stream | None = None) -> Event:
        """Returns an event after all work that was handed to `stream` so far."""

    @abstractmethod
    def create_stream(self) -> Stream:
        """Returns a further stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all streams."""

    @abstractmethod
    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns zeroed host memory for copies that do not block the host (pinned, where that makes a difference).
        Inside work, copy with `non_blocking=True`."""

    @abstractmethod
    def capture(self, work: Work) -> Graph:
        """Captures the operations of `work` without running them; `work` was run once before. Raises `CapacityError`
        where memory does not suffice, and what torch raises for work that synchronises or reads host memory: both end
        the worker. Raises `ConfigError`, before anything is captured, where the device captures nothing: steps then run
        eagerly where `Runtime.graphs` is "auto"."""

    @abstractmethod
    def memory(self) -> DeviceMemory:
        """Returns free and total memory now. Memory that a caching allocator keeps counts as used."""

    @abstractmethod
    def measure(self, work: Work) -> int:
        """Runs `work` to its end and returns the peak of its memory: bytes above what was held before."""

    @abstractmethod
    def release_unused(self) -> None:
        """Returns unused memory of a caching allocator to the device."""


@dataclass(frozen=True)
class Runtime:
    """How a worker drives its device, as the executor chooses. It pickles, so `create_device` is a class or a function
    of a module."""

    create_device: Callable[[str], Device]
    """Makes the device from `Placement.device`. The worker's process calls it before weights are read."""
    graphs: Literal["auto", "off"] | tuple[int, ...] = "auto"
    """Batch sizes (in requests) for which decode and verify steps are captured. "auto": a ladder of sizes, or, with a
    warning, none where the attention backend or the model cannot be captured. Explicit sizes raise there."""
    compile_mode: str | None = None
    """Mode of `torch.compile` for the model's forward pass; None: not compiled."""
