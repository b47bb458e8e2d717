"""One CUDA device, by torch's streams, events, pinned memory and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch

from dovetail.contracts.device import Device, DeviceMemory, Event, Graph, Stream, Work
from dovetail.contracts.errors import CapacityError
from dovetail.executors.gpu.out_of_memory import is_out_of_memory


class CudaStream(Stream):
    """Wraps a stream of torch."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream = stream


class CudaEvent(Event):
    """Wraps an event of torch, without timing, which costs time."""

    def __init__(self, stream: torch.cuda.Stream):
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        """Waits without holding the interpreter's lock."""
        self.event.synchronize()

    def is_done(self) -> bool:
        """Asks the CUDA driver whether the event is done."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaGraph(Graph):
    """Wraps a CUDA graph of torch."""

    def __init__(self, graph: torch.cuda.CUDAGraph):
        self._graph = graph

    def replay(self) -> None:
        """Replays the graph in the current stream."""
        self._graph.replay()


class CudaDevice(Device):
    """A GPU. Its main stream is not CUDA's default stream, which cannot be captured."""

    def __init__(self, name: str):
        self.torch_device = torch.device(name)
        torch.cuda.set_device(self.torch_device)
        self._main = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._main)
        self._pool: Any = None
        self._graphs: WeakSet[CudaGraph] = WeakSet()
        """Those that are still there."""

    def launch(self, work: Work, *, stream: Stream | None = None, after: Sequence[Event] = ()) -> None:
        """Issues the work now; the device runs it later."""
        target = self._stream(stream)
        for event in after:
            if isinstance(event, CudaEvent):
                target.wait_event(event.event)
        with torch.cuda.stream(target):
            work()

    def record(self, stream: Stream | None = None) -> Event:
        """Records an event in the stream."""
        return CudaEvent(self._stream(stream))

    def create_stream(self) -> Stream:
        """Creates a stream of the device."""
        return CudaStream(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize(self.torch_device)

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns pinned memory."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def capture(self, work: Work) -> Graph:
        """Captures into a memory pool that all graphs share: they never run at the same time. torch frees a pool with
        its last graph, so the next graph starts another pool."""
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # Other threads, such as NCCL's watchdog, may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._main, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise CapacityError(
                f"no memory is left for captured graphs ({error}): lower cache.memory_fraction, or name fewer sizes in "
                "executor.cuda_graphs"
            ) from error
        captured = CudaGraph(graph)
        self._graphs.add(captured)
        return captured

    def memory(self) -> DeviceMemory:
        """Memory as the CUDA driver counts it."""
        self.release_unused()
        return DeviceMemory(*torch.cuda.mem_get_info(self.torch_device))

    def measure(self, work: Work) -> int:
        """Measures by torch's allocator."""
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_allocated(self.torch_device)
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.torch_device) - before

    def release_unused(self) -> None:
        """Empties torch's cache."""
        torch.cuda.empty_cache()

    def _stream(self, stream: Stream | None) -> torch.cuda.Stream:
        if stream is None:
            return self._main
        if not isinstance(stream, CudaStream):
            raise TypeError(f"a {type(stream).__name__} is no stream of this device")
        return stream.stream
