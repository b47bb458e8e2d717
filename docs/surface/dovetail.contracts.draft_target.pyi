import numpy as np, torch
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import dataclass
from dovetail.contracts.speculation import DraftWorker
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
