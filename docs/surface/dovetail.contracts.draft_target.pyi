import numpy as np
from abc import abstractmethod
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
