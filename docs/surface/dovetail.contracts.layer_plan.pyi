from collections.abc import Mapping, Set
from dataclasses import dataclass
from dovetail.contracts.kv import LayerCache
from dovetail.contracts.quantization import LayerSupport, LinearShape, QuantizationMethod


@dataclass(frozen=True)
class Served:
    layers: Mapping[str, LayerSupport]
    num_offered: int
    reasons: Mapping[str, int]
    @property
    def names(self) -> Set[str]: ...
    @property
    def left_out(self) -> str: ...


@dataclass(frozen=True)
class PlannedLayer:
    shape: LinearShape
    sources: tuple[str, ...]
    is_table: bool = False
    is_head: bool = False
    @property
    def weights(self) -> int: ...
    @property
    def is_expert(self) -> bool: ...


@dataclass(frozen=True)
class LayerPlan:
    layers: tuple[PlannedLayer, ...]
    rest: int
    caches: tuple[LayerCache, ...]
    active_experts: float
    tables: tuple[PlannedLayer, ...] = ()
    def offered(self, method: QuantizationMethod) -> tuple[PlannedLayer, ...]: ...
    def ask(self, method: QuantizationMethod) -> Served: ...
    def num_bytes(self, held: Mapping[str, float]) -> int: ...
