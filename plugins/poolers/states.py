"""Poolers that select or average states: `last`, `cls`, `mean` and `token`."""

from __future__ import annotations

from typing import ClassVar

import torch

from dovetail.contracts.pooling import Pooler, PoolerCapabilities, PoolingState
from dovetail.contracts.pooling_params import EMBED, TOKEN_EMBED


class LastPooler(Pooler):
    """The state of the last token: of decoders, the one that saw the whole prompt."""

    contract = (1, 0)
    preference: ClassVar[int] = 10
    capabilities = PoolerCapabilities(tasks=frozenset({EMBED}), modes=frozenset({"lasttoken"}), skips_prefix=True)

    def start(self, num_tokens: int) -> PoolingState:
        return LastState()


class LastState(PoolingState):
    """The last state so far."""

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None

    def add(self, hidden: torch.Tensor, positions: range) -> None:
        self._last = hidden[-1].clone()

    def finish(self) -> torch.Tensor:
        assert self._last is not None, "a prompt has a token"
        return self._last.float()


class ClsPooler(Pooler):
    """The state of the first token, where BERT and its kind put [CLS]. A decoder's first token has seen no other."""

    contract = (1, 0)
    capabilities = PoolerCapabilities(tasks=frozenset({EMBED}), modes=frozenset({"cls"}))

    def start(self, num_tokens: int) -> PoolingState:
        return FirstState()


class FirstState(PoolingState):
    """The first state."""

    def __init__(self) -> None:
        self._first: torch.Tensor | None = None

    def add(self, hidden: torch.Tensor, positions: range) -> None:
        if self._first is None:
            self._first = hidden[0].clone()

    def finish(self) -> torch.Tensor:
        assert self._first is not None, "a prompt has a token"
        return self._first.float()


class MeanPooler(Pooler):
    """The mean of all states. It is summed in float64, so that it does not depend on the chunks of a prompt."""

    contract = (1, 0)
    preference: ClassVar[int] = 5
    capabilities = PoolerCapabilities(tasks=frozenset({EMBED}), modes=frozenset({"mean"}))

    def start(self, num_tokens: int) -> PoolingState:
        return MeanState()


class MeanState(PoolingState):
    """The sum of the states so far, and how many they are."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._count = 0

    def add(self, hidden: torch.Tensor, positions: range) -> None:
        total = hidden.double().sum(0)
        self._sum = total if self._sum is None else self._sum + total
        self._count += len(positions)

    def finish(self) -> torch.Tensor:
        assert self._sum is not None, "a prompt has a token"
        return (self._sum / self._count).float()


class TokenPooler(Pooler):
    """The states of all tokens, one vector each, as late interaction (ColBERT, Khattab and Zaharia 2020) takes them."""

    contract = (1, 0)
    capabilities = PoolerCapabilities(tasks=frozenset({TOKEN_EMBED}))

    def start(self, num_tokens: int) -> PoolingState:
        return AllStates()


class AllStates(PoolingState):
    """The states so far, in float32."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []

    def add(self, hidden: torch.Tensor, positions: range) -> None:
        self._chunks.append(hidden.to(torch.float32, copy=True))

    def finish(self) -> torch.Tensor:
        return torch.cat(self._chunks)
