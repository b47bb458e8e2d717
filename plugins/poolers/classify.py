"""Poolers that score: the checkpoint's score head over the last state, or over each."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from dovetail.contracts.errors import PluginError
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.pooling import Pooler, PoolerCapabilities, PoolerNeed, PoolerSetup, PoolingState
from dovetail.contracts.pooling_params import CLASSIFY, TOKEN_CLASSIFY

NO_HEAD = "the checkpoint has no score head, from which labels get their scores"


class _ScoringPooler(Pooler):
    """Base of both: they need a head."""

    def __init__(self, options: PluginOptions, setup: PoolerSetup):
        super().__init__(options, setup)
        if setup.score is None:
            raise PluginError(NO_HEAD)
        self._score = setup.score

    @classmethod
    def check(cls, need: PoolerNeed, options: Any, environment: Environment) -> list[str]:
        """A head of one label or more."""
        return [] if need.num_labels else [NO_HEAD]

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> float32 [n, num_labels]"""
        return self._score(hidden).float()


class ClassifyPooler(_ScoringPooler):
    """Scores of the prompt: those of its last token, as Hugging Face's `ForSequenceClassification` of decoders."""

    contract = (1, 0)
    preference: ClassVar[int] = 10
    capabilities = PoolerCapabilities(tasks=frozenset({CLASSIFY}), modes=frozenset({"lasttoken"}), skips_prefix=True)

    def start(self, num_tokens: int) -> PoolingState:
        return _LastScore(self)


class _LastScore(PoolingState):
    def __init__(self, pooler: ClassifyPooler):
        self._pooler = pooler
        self._last: torch.Tensor | None = None

    def add(self, hidden: torch.Tensor, positions: range) -> None:
        self._last = hidden[-1:].clone()

    def finish(self) -> torch.Tensor:
        assert self._last is not None, "a prompt has a token"
        return self._pooler.scores(self._last)[0]


class ClassifyClsPooler(_ScoringPooler):
    """Scores of the prompt: those of its first token, as Hugging Face's `ForSequenceClassification` of encoders."""

    contract = (1, 0)
    capabilities = PoolerCapabilities(tasks=frozenset({CLASSIFY}), modes=frozenset({"cls"}))

    def start(self, num_tokens: int) -> PoolingState:
        return _FirstScore(self)


class _FirstScore(PoolingState):
    def __init__(self, pooler: ClassifyClsPooler):
        self._pooler = pooler
        self._first: torch.Tensor | None = None

    def add(self, hidden: torch.Tensor, positions: range) -> None:
        if self._first is None:
            self._first = hidden[:1].clone()

    def finish(self) -> torch.Tensor:
        assert self._first is not None, "a prompt has a token"
        return self._pooler.scores(self._first)[0]


class TokenClassifyPooler(_ScoringPooler):
    """Scores of every token of the prompt: the rewards of a process reward model, say."""

    contract = (1, 0)
    capabilities = PoolerCapabilities(tasks=frozenset({TOKEN_CLASSIFY}))

    def start(self, num_tokens: int) -> PoolingState:
        return _AllScores(self)


class _AllScores(PoolingState):
    def __init__(self, pooler: TokenClassifyPooler):
        self._pooler = pooler
        self._chunks: list[torch.Tensor] = []

    def add(self, hidden: torch.Tensor, positions: range) -> None:
        self._chunks.append(self._pooler.scores(hidden).clone())

    def finish(self) -> torch.Tensor:
        return torch.cat(self._chunks)
