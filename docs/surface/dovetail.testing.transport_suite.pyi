import torch
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dovetail.contracts.weight_transport import WeightTransport
from dovetail.contracts.weights import WeightReader
from dovetail.testing.suite import PluginSuite
from pathlib import Path
from typing import Any, ClassVar


class WeightSender(ABC):
    @abstractmethod
    def connect(self, num_ranks: int) -> Mapping[str, Any]: ...
    @abstractmethod
    def send(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, Any]: ...
    def close(self) -> None: ...

CreateSender = Callable[[Path], WeightSender]

class WeightTransportSuite(PluginSuite):
    kind: ClassVar[str] = 'weight_transport'
    plugin: ClassVar[type[WeightTransport]]
    options: ClassVar[Mapping[str, Any]] = {}
    create_sender: ClassVar[CreateSender | None] = None
    open_checkpoint: ClassVar[Callable[[Path], WeightReader]] = _refuse_checkpoint
    function_attributes: ClassVar[frozenset[str]] = frozenset({'create_sender', 'open_checkpoint'})
    @classmethod
    def reason_incomplete(cls) -> str | None: ...
    def sender(self, tmp_path: Path) -> Iterator[WeightSender]: ...
    def transport(self, sender: WeightSender) -> Iterator[WeightTransport]: ...

def bucket(index: int) -> dict[str, torch.Tensor]: ...
def check_equal(reader: WeightReader, tensors: Mapping[str, torch.Tensor]) -> None: ...
