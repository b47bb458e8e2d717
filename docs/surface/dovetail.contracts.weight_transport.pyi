import torch
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dovetail.contracts.pausing import EngineConflict
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.weights import WeightReader
from pathlib import Path
from typing import Any, ClassVar


class WeightUpdateConflict(EngineConflict):
    ...


@dataclass(frozen=True, kw_only=True)
class WeightTransportCapabilities:
    device_types: frozenset[str] | None = frozenset()
    tensor_parallel: int | None = 1
    keeps_tensors: bool = False


@dataclass(frozen=True)
class WeightTransportNeed:
    device_type: str
    tensor_parallel: int = 1


@dataclass(frozen=True, kw_only=True)
class TransportSetup:
    device: torch.device
    rank: int
    num_ranks: int
    open_checkpoint: Callable[[Path], WeightReader]


@dataclass(frozen=True, kw_only=True)
class WeightsReport:
    version: int
    checksum: str


class WeightTransport(Plugin):
    capabilities: ClassVar[WeightTransportCapabilities] = WeightTransportCapabilities()
    def __init__(self, options: PluginOptions, setup: TransportSetup): ...
    options: PluginOptions
    setup: TransportSetup
    def connect(self, init_info: Mapping[str, Any]) -> None: ...
    @abstractmethod
    def receive(self, update_info: Mapping[str, Any]) -> WeightReader: ...
    def close(self) -> None: ...
