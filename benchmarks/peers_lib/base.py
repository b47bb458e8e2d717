"""What an engine offers to the benchmarks, ours and the peers alike. Runs inside each peer's virtual environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Prompts = Sequence[Sequence[int]]

MAX_MODEL_LEN = 2048
"""Tokens of the longest sequence in any workload, rounded up."""


@dataclass(frozen=True)
class EngineSpec:
    """Which engine a worker process loads, and how."""

    engine: str
    """Key of `peers_worker.ENGINES`."""
    model: str
    """Path of a file or directory, or what Dovetail calls a model reference."""
    threads: int
    options: Mapping[str, Any]
    """The engine's own; see its module."""


class Engine(ABC):
    """A model that is loaded."""

    version: str

    @abstractmethod
    def generate(self, prompts: Prompts, num_tokens: int, num_shared: int = 0) -> list[list[int]]:
        """Exactly `num_tokens` greedy tokens after each prompt, end of sequence ignored. The first `num_shared` tokens
        of all prompts are the same."""


class ScoringEngine(Engine):
    """An engine that tells the whole distribution of each next token."""

    @abstractmethod
    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32 [T, vocab_size]: row t is computed from token_ids[: t + 1]."""
