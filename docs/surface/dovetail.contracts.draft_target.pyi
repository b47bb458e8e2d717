import numpy as np, torch
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from dovetail.contracts.speculation import DraftWorker, SpeculationNeed
from typing import Any


@dataclass(frozen=True)
class TopTokens:
    follows: np.ndarray
    parents: np.ndarray
    ids: np.ndarray


class ReadsTopTokens(DraftWorker):
    @classmethod
    @abstractmethod
    def num_top_tokens(cls, options: Any) -> int: ...


class TargetPasses(ABC):
    @abstractmethod
    def run(
        self,
        seq_ids: Sequence[int],
        starts: np.ndarray,
        counts: np.ndarray,
        token_ids: np.ndarray,
        skipped: Set[int],
    ) -> torch.Tensor: ...


class RunsTarget(DraftWorker):
    ...


class UpdatesWeights(DraftWorker):
    @abstractmethod
    def expected_weights(self) -> Mapping[str, tuple[int, ...]]: ...
    @abstractmethod
    def load_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        partial: bool = False,
    ) -> None: ...


class NamesWeights(DraftWorker):
    @abstractmethod
    def own_weights(self) -> Iterable[torch.Tensor | torch.nn.Module]: ...


@dataclass(frozen=True, kw_only=True)
class TargetParts:
    embedding: bool = False
    output: bool = False
    def __bool__(self) -> bool: ...


class CallsTarget(DraftWorker):
    @classmethod
    @abstractmethod
    def target_parts(cls, options: Any, need: SpeculationNeed) -> TargetParts: ...


class CopiesTarget(DraftWorker):
    @abstractmethod
    def target_changed(self) -> None: ...
