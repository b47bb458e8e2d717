from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from dovetail.contracts.model import ModelContext, ModelFamily
from typing import Any, Literal

Part = Literal['embedding', 'layers', 'output']

@dataclass(frozen=True)
class Collective:
    operation: Literal['all_reduce', 'all_gather']
    width: int
    part: Part = 'layers'


class CallsCollectives(ABC):
    @abstractmethod
    def collectives(self) -> tuple[Collective, ...]: ...

def planned_collectives(
    family: ModelFamily,
    config: Mapping[str, Any],
    context: ModelContext,
) -> tuple[Collective, ...]: ...
