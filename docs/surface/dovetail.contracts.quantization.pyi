import torch
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.weights import PackedTensor
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class QuantizationCapabilities:
    device_types: frozenset[str] | None = frozenset()
    dtypes: frozenset[str] | None = frozenset()
    packed_formats: frozenset[str] = frozenset()
    embeddings: bool = False
    batch_invariant: bool = False
    reloads_rows: bool = False
    graph_capture: bool = False
    for_drafters: bool = False


@dataclass(frozen=True)
class QuantizationNeed:
    device_type: str
    dtype: str
    packed_formats: frozenset[str] = frozenset()
    batch_invariant: bool = False


@dataclass(frozen=True)
class LinearShape:
    name: str
    in_features: int
    out_features: int
    has_bias: bool


@dataclass(frozen=True, kw_only=True)
class LayerSupport:
    is_served: bool = False
    why_not: str | None = None
    bytes_per_weight: float = 0.0
    packed_bytes_per_weight: Mapping[str, float] = field(default_factory=dict)
    reads_once: bool = False
    def least_bytes_per_weight(self, packed_formats: Collection[str]) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Findings:
    refusals: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class LinearKernel(ABC):
    @abstractmethod
    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None: ...
    def finish(self) -> None: ...
    @abstractmethod
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...
    def tensors(self) -> Iterable[torch.Tensor]: ...


class LooksUpRows(LinearKernel):
    @abstractmethod
    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...


class KeepsPacked(LinearKernel):
    @abstractmethod
    def layout(self) -> str: ...
    @abstractmethod
    def packed(self) -> Mapping[str, torch.Tensor]: ...
    @abstractmethod
    def restore(self, packed: Mapping[str, torch.Tensor]) -> None: ...


class QuantizationMethod(Plugin):
    capabilities: ClassVar[QuantizationCapabilities] = QuantizationCapabilities()
    def __init__(self, options: PluginOptions, need: QuantizationNeed): ...
    options: PluginOptions
    need: QuantizationNeed
    @abstractmethod
    def describe(self, shape: LinearShape) -> LayerSupport: ...
    @abstractmethod
    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel: ...
    def examine(self, shapes: Sequence[LinearShape]) -> Findings: ...
