import torch
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Work = Callable[[], None]

@dataclass(frozen=True)
class DeviceMemory:
    free: int
    total: int


class Event(ABC):
    @abstractmethod
    def wait(self) -> None: ...
    @abstractmethod
    def is_done(self) -> bool: ...


class Graph(ABC):
    @abstractmethod
    def replay(self) -> None: ...


class Stream:
    ...


class Device(ABC):
    torch_device: torch.device
    @abstractmethod
    def launch(
        self,
        work: Work,
        *,
        stream: Stream | None = None,
        after: Sequence[Event] = (),
    ) -> None: ...
    @abstractmethod
    def record(self, stream: Stream | None = None) -> Event: ...
    @abstractmethod
    def create_stream(self) -> Stream: ...
    @abstractmethod
    def synchronize(self) -> None: ...
    @abstractmethod
    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor: ...
    @abstractmethod
    def capture(self, work: Work) -> Graph: ...
    @abstractmethod
    def memory(self) -> DeviceMemory: ...
    @abstractmethod
    def measure(self, work: Work) -> int: ...
    @abstractmethod
    def release_unused(self) -> None: ...


@dataclass(frozen=True)
class Runtime:
    create_device: Callable[[str], Device]
    graphs: Literal['auto', 'off'] | tuple[int, ...] = 'auto'
    compile_mode: str | None = None
