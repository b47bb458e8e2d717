import torch
from abc import abstractmethod
from dataclasses import dataclass
from dovetail.contracts.plugin import Plugin, PluginOptions
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class OperatorsCapabilities:
    device_types: frozenset[str] | None = frozenset()
    dtypes: frozenset[str] | None = frozenset()
    graph_capture: bool = True


@dataclass(frozen=True)
class OperatorsNeed:
    device_type: str
    dtype: str


class Operators(Plugin):
    capabilities: ClassVar[OperatorsCapabilities] = OperatorsCapabilities()
    def __init__(self, options: PluginOptions): ...
    options: PluginOptions
    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...
    @abstractmethod
    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    @abstractmethod
    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...
    @abstractmethod
    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...
    def take_rows(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor: ...


class DrawsTokens(Operators):
    @abstractmethod
    def draw(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        min_p: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor: ...


class MultipliesGroups(Operators):
    @abstractmethod
    def grouped_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        starts: torch.Tensor,
    ) -> torch.Tensor: ...


class AcceptsChains(Operators):
    @abstractmethod
    def accept_chains(
        self,
        target: torch.Tensor,
        draft: torch.Tensor,
        token_ids: torch.Tensor,
        starts: torch.Tensor,
        accept_uniforms: torch.Tensor,
        recover_uniforms: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class AddsLowRank(Operators):
    @abstractmethod
    def add_low_rank(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        part_starts: torch.Tensor,
        ranks: torch.Tensor,
        slots: torch.Tensor,
    ) -> None: ...


class AddsNarrowLowRank(AddsLowRank):
    ...
