from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from dovetail.contracts.speculation import Draft, DraftCapabilities, DraftWorker
from typing import Any


class DraftStage(ABC):
    name: str
    capabilities: DraftCapabilities
    num_tokens: int
    @abstractmethod
    def propose(self, max_drafts: Sequence[int]) -> Sequence[Draft | None]: ...
    @abstractmethod
    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None: ...


class ComposesDrafters(DraftWorker):
    @classmethod
    @abstractmethod
    def stages(cls, options: Any) -> Sequence[str]: ...


@dataclass(frozen=True)
class StageAbilities:
    capabilities: DraftCapabilities
    num_tokens: int

def with_stages(
    own: DraftCapabilities,
    stages: Iterable[DraftCapabilities],
) -> DraftCapabilities: ...
