"""Hidden states between pipeline stages: each worker receives from the worker of the stage before with its own tensor
rank, and sends to that of the stage behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from dovetail.contracts.errors import ModelError
from dovetail.contracts.executor import Placement

_MOST_UNDER_WAY = 2
"""Sends that a stage does not wait for: it computes its next step while the stage behind it is busy with the last."""


class StageLink(ABC):
    """Where a worker's passes begin and end."""

    is_last: bool
    """Whether the worker's module has the final norm and computes logits."""

    @abstractmethod
    def entering(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns what the first layer here is computed from, for int64 [T] token ids: the ids on the first stage, [T,
        hidden_size] states of the stage before on others, which waits for them."""

    @abstractmethod
    def send(self, hidden: torch.Tensor) -> None:
        """Hands states [T, hidden_size] to the next stage; they may be overwritten afterwards. Not on the last."""

    def blank(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Returns what `entering` would, for token ids 0, without asking anybody."""
        return torch.zeros(num_tokens, dtype=torch.int64, device=device)


class OnlyStage(StageLink):
    """The worker has all layers."""

    is_last = True

    def entering(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns `ids`."""
        return ids

    def send(self, hidden: torch.Tensor) -> None:
        """Never called: the only stage is the last."""
        raise AssertionError("the last stage has nobody to send to")


class OneOfStages(StageLink):
    """Over the process group of all ranks of a layout."""

    def __init__(self, placement: Placement, hidden_size: int, dtype: torch.dtype, device: torch.device):
        """`dtype`: of the states that stages exchange, the model's."""
        self.is_last = placement.stage == placement.num_stages - 1
        self._is_first = placement.stage == 0
        self._before = placement.position - placement.tensor_parallel
        self._behind = placement.position + placement.tensor_parallel
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()
        """Sends, and what they read."""

    def entering(self, ids: torch.Tensor) -> torch.Tensor:
        """As `StageLink.entering`."""
        if self._is_first:
            return ids
        states = torch.empty(len(ids), self._hidden_size, dtype=self._dtype, device=self._device)
        dist.recv(states, src=self._before)
        return states

    def send(self, hidden: torch.Tensor) -> None:
        """As `StageLink.send`. Raises `ModelError` for states of another dtype or size than the stages agreed on."""
        if hidden.dtype != self._dtype or hidden.shape[1] != self._hidden_size:
            raise ModelError(
                f"a stage computed states of {hidden.shape[1]} x {hidden.dtype}, and the next one expects"
                f" {self._hidden_size} x {self._dtype}: the model family must pass on the residual stream in the"
                " model's dtype"
            )
        while len(self._under_way) >= _MOST_UNDER_WAY:
            self._under_way.popleft()[0].wait()
        kept = hidden.clone()  # the pass may write its next states to the same memory
        self._under_way.append((dist.isend(kept, dst=self._behind), kept))

    def blank(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """As `StageLink.blank`."""
        if self._is_first:
            return super().blank(num_tokens, device)
        return torch.zeros(num_tokens, self._hidden_size, dtype=self._dtype, device=device)


def create_link(placement: Placement, hidden_size: int, dtype: torch.dtype, device: torch.device) -> StageLink:
    """The link of one rank, whose process group exists."""
    return OnlyStage() if placement.num_stages == 1 else OneOfStages(placement, hidden_size, dtype, device)
