import torch
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.weights import PackedTensor
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class QuantizationCapabilities:
    device_types: frozenset[str] | None = frozenset()
    dtypes: frozenset[str] | None = frozenset()
    batch_invariant: bool = False


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


class LinearKernel(ABC):
    @abstractmethod
    def load(self, rows: slice, weight: torch.Tensor | PackedTensor) -> None: ...
    def finish(self) -> None: ...
    def packed(self) -> Mapping[str, torch.Tensor]: ...
    def restore(self, packed: Mapping[str, torch.Tensor]) -> None: ...
    @abstractmethod
    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...
    def tensors(self) -> Iterable[torch.Tensor]: ...
    def lookup(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...


class QuantizationMethod(Plugin):
    capabilities: ClassVar[QuantizationCapabilities] = QuantizationCapabilities()
    holds: ClassVar[frozenset[str]] = frozenset()
    embeddings: ClassVar[bool] = False
    reloads_rows: ClassVar[bool] = False
    for_drafters: ClassVar[bool] = False
    def __init__(self, options: PluginOptions, need: QuantizationNeed): ...
    options: PluginOptions
    need: QuantizationNeed
    @abstractmethod
    def create_linear(self, shape: LinearShape, device: torch.device) -> LinearKernel | None: ...
    def why_not(self, shape: LinearShape) -> str | None: ...
    def against_layers(self, shapes: Sequence[LinearShape]) -> list[str]: ...
    def caveat(self) -> str | None: ...
    def reads_only_held(self) -> bool: ...
    def layout(self) -> str | None: ...
    @abstractmethod
    def bytes_per_weight(self) -> float: ...
    def layer_bytes_per_weight(self, shape: LinearShape) -> float: ...
    def held_bytes_per_weight(self, packed_format: str) -> float | None: ...
