from collections.abc import Mapping
from dataclasses import dataclass, field
from dovetail.config.resolved import ResolvedConfig
from dovetail.registry.contents import Contents
from dovetail.registry.registry import Registry
from pathlib import Path
from typing import Any

__all__ = [
    "Difference",
    "Lock",
    "LockedCode",
    "LockedModel",
    "LockedPart",
    "check_target",
    "compare_locks",
    "compare_with_machine",
    "not_as_installed",
    "read_lock",
    "take_lock",
    "uncompared_parts",
    "write_lock",
]

@dataclass(frozen=True)
class Difference:
    subject: str
    what: str
    is_informative: bool = False


@dataclass(frozen=True)
class Lock:
    parts: Mapping[str, LockedPart]
    distributions: Mapping[str, LockedCode]
    models: Mapping[str, LockedModel]
    values: Mapping[str, Any] = field(default_factory=dict)
    informative: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LockedCode:
    version: str | None
    sha256: str
    files: Mapping[str, str]
    @classmethod
    def of(cls, contents: Contents, version: str | None) -> LockedCode: ...


@dataclass(frozen=True)
class LockedModel:
    config: str
    tensors: str
    files: Mapping[str, str]


@dataclass(frozen=True)
class LockedPart:
    kind: str
    name: str
    reference: str
    contract: str
    distribution: str | None = None
    local: LockedCode | None = None

def check_target(path: str | Path) -> None: ...
def compare_locks(
    first: Lock,
    second: Lock,
    names: tuple[str, str] = ('the first', 'the second'),
) -> list[Difference]: ...
def compare_with_machine(
    lock: Lock,
    resolved: ResolvedConfig | None = None,
    registry: Registry | None = None,
) -> list[Difference]: ...
def not_as_installed(lock: Lock) -> list[str]: ...
def read_lock(path: str | Path) -> Lock: ...
def take_lock(
    resolved: ResolvedConfig,
    registry: Registry | None = None,
    *,
    whole_weights: bool = False,
) -> Lock: ...
def uncompared_parts(lock: Lock) -> list[str]: ...
def write_lock(lock: Lock, path: str | Path) -> None: ...
