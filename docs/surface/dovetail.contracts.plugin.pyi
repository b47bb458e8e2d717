from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field
from pydantic import BaseModel
from typing import Any, ClassVar, Literal

Stability = Literal['experimental', 'provisional', 'stable']

class PluginOptions(BaseModel):
    ...


@dataclass(frozen=True)
class ContractVersion:
    major: int
    minor: int


@dataclass(frozen=True)
class DeviceInfo:
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class Environment:
    device_type: str
    num_cpus: int
    memory_bytes: int
    cpu_features: frozenset[str] = frozenset()
    num_cores: int | None = None
    devices: tuple[DeviceInfo, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    no_devices: str = ''
    torch_pins: Mapping[str, str] = field(default_factory=dict)
    @property
    def mismatches(self) -> tuple[str, ...]: ...


class FixableReason(str):
    ...


class Plugin(ABC):
    contract: ClassVar[tuple[int, int]]
    capabilities: ClassVar[Any] = None
    Options: ClassVar[type[PluginOptions]] = PluginOptions
    preference: ClassVar[int] = 0
    stability: ClassVar[Stability] = 'provisional'
    @classmethod
    def check(cls, need: Any, options: Any, environment: Environment) -> list[str]: ...
