import torch
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from dovetail.contracts.plugin import Plugin, PluginOptions
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class PoolerCapabilities:
    tasks: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()
    skips_prefix: bool = False


@dataclass(frozen=True, kw_only=True)
class PoolerNeed:
    task: str
    hidden_size: int
    num_labels: int = 0
    mode: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class PoolerSetup:
    need: PoolerNeed
    score: Callable[[torch.Tensor], torch.Tensor] | None = None


class PoolingState(ABC):
    @abstractmethod
    def add(self, hidden: torch.Tensor, positions: range) -> None: ...
    @abstractmethod
    def finish(self) -> torch.Tensor: ...


class Pooler(Plugin):
    capabilities: ClassVar[PoolerCapabilities] = PoolerCapabilities()
    def __init__(self, options: PluginOptions, setup: PoolerSetup): ...
    options: PluginOptions
    setup: PoolerSetup
    @abstractmethod
    def start(self, num_tokens: int) -> PoolingState: ...
