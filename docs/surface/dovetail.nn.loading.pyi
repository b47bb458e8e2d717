import logging, re, torch
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dovetail.contracts.weights import PackedTensor
from typing import ClassVar

logger = logging.getLogger('dovetail.nn')
NamedTensors = Iterable[tuple[str, torch.Tensor]]
NamedWeights = Iterable[tuple[str, torch.Tensor | PackedTensor]]

class WeightHolder(torch.nn.Module, ABC):
    takes_packed: ClassVar[bool] = False
    @abstractmethod
    def expected(self) -> Mapping[str, tuple[int, ...]]: ...
    @abstractmethod
    def load(self, name: str, tensor: torch.Tensor) -> None: ...
    def finish(self) -> None: ...
    def sources(self) -> Sequence[WeightHolder]: ...

Expansion = Callable[[re.Match[str], torch.Tensor], NamedTensors]

@dataclass(frozen=True, kw_only=True)
class WeightRules:
    renamed: tuple[tuple[str, str], ...] = ()
    expanded: tuple[tuple[str, Expansion], ...] = ()
    ignored: tuple[str, ...] = ('.*\\.rotary_emb\\.inv_freq', '.*\\.attn\\.bias', '.*\\.masked_bias')
    tied: Mapping[str, str] = field(default_factory=dict)

def expected_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]: ...
def num_parameters(module: torch.nn.Module) -> int: ...
def load_weights(
    module: torch.nn.Module,
    weights: NamedWeights,
    rules: WeightRules | None = None,
    *,
    partial: bool = False,
) -> None: ...
def foreign_names(unexpected: Iterable[str], expected: Iterable[str]) -> list[str]: ...
def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool: ...
def translated(
    weights: NamedWeights,
    rules: WeightRules,
) -> Iterator[tuple[str, torch.Tensor | PackedTensor]]: ...
