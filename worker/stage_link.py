"""Hidden states between pipeline stages: each worker receives from the worker of the stage before with its own tensor
rank, and sends to that of the stage behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dovetail.contracts.errors import ModelError
from dovetail.contracts.executor import Placement

_MOST_UNDER_WAY = 2
"""Sends that a stage does not wait for: it computes its next step while the stage behind it is busy with the last."""


@dataclass(frozen=True)
class PassedOn:
    """What a stage gets and sends of each token."""

    hidden_size: int
    dtype: torch.dtype
    """Of the states, the model's."""
    num_earlier: int = 0
    """States between the layers of earlier stages, which drafters on the last stage read."""
    num_own: int = 0
    """Those that this stage adds."""


class StageLink(ABC):
    """Where a worker's passes begin and end."""

    is_last: bool
    """Whether the worker's module has the final norm and computes logits."""

    @abstractmethod
    def entering(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns what the first layer here is computed from, for int64 [T] token ids: the ids on the first stage, [T,
        hidden_size] states of the stage before on others, which waits for them."""

    @abstractmethod
    def joined(self, layer_states: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the states between layers that came with the last `entering`, and those that this stage computed,
        side by side: [T, n * hidden_size], None for none."""

    @abstractmethod
    def send(self, hidden: torch.Tensor, layer_states: torch.Tensor | None) -> None:
        """Hands states [T, hidden_size], and what `joined` returned, to the next stage; they may be overwritten
        afterwards. Not on the last."""

    def blank(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Returns what `entering` would, for token ids 0, without asking anybody."""
        return torch.zeros(num_tokens, dtype=torch.int64, device=device)


class OnlyStage(StageLink):
    """The worker has all layers."""

    is_last = True

    def entering(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns `ids`."""
        return ids

    def joined(self, layer_states: torch.Tensor | None) -> torch.Tensor | None:
        """Returns `layer_states`."""
        return layer_states

    def send(self, hidden: torch.Tensor, layer_states: torch.Tensor | None) -> None:
        """Never called: the only stage is the last."""
        raise AssertionError("the last stage has nobody to send to")


class OneOfStages(StageLink):
    """Over the process group of all ranks of a layout. States between layers travel in the message of the residual
    stream, behind it."""

    def __init__(self, placement: Placement, passed: PassedOn, device: torch.device):
        self.is_last = placement.stage == placement.num_stages - 1
        self._is_first = placement.stage == 0
        self._before = placement.position - placement.tensor_parallel
        self._behind = placement.position + placement.tensor_parallel
        self._passed = passed
        self._hidden_size, self._dtype = passed.hidden_size, passed.dtype
        self._device = device
        self._earlier: torch.Tensor | None = None
        """States between layers of the stages before, of the pass that runs."""
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()
        """Sends, and what they read."""

    def entering(self, ids: torch.Tensor) -> torch.Tensor:
        """As `StageLink.entering`."""
        if self._is_first:
            return ids
        width = self._hidden_size * (1 + self._passed.num_earlier)
        states = torch.empty(len(ids), width, dtype=self._dtype, device=self._device)
        dist.recv(states, src=self._before)
        if width == self._hidden_size:
            return states
        self._earlier = states[:, self._hidden_size :]
        return states[:, : self._hidden_size].contiguous()

    def joined(self, layer_states: torch.Tensor | None) -> torch.Tensor | None:
        """As `StageLink.joined`."""
        parts = [states for states in (self._earlier, layer_states) if states is not None]
        self._earlier = None
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0] if parts else None

    def send(self, hidden: torch.Tensor, layer_states: torch.Tensor | None) -> None:
        """As `StageLink.send`. Raises `ModelError` for states of another dtype or size than the stages agreed on."""
        if hidden.dtype != self._dtype or hidden.shape[1] != self._hidden_size:
            raise ModelError(
                f"a stage computed states of {hidden.shape[1]} x {hidden.dtype}, and the next one expects"
                f" {self._hidden_size} x {self._dtype}: the model family must pass on the residual stream in the"
                " model's dtype"
            )
        self._check_layer_states(layer_states)
        while len(self._under_way) >= _MOST_UNDER_WAY:
            self._under_way.popleft()[0].wait()
        # A copy: the pass may write its next states to the same memory.
        kept = hidden.clone() if layer_states is None else torch.cat((hidden, layer_states), dim=1)
        self._under_way.append((dist.isend(kept, dst=self._behind), kept))

    def _check_layer_states(self, states: torch.Tensor | None) -> None:
        width = self._hidden_size * (self._passed.num_earlier + self._passed.num_own)
        found = 0 if states is None else states.shape[1]
        if found != width or (states is not None and states.dtype != self._dtype):
            kind = "none" if states is None else f"{found} x {states.dtype}"
            raise ModelError(
                f"a stage passes on states between layers, {kind}, and the next one expects {width} x {self._dtype}:"
                " the model family must return those that ModelInputs.layers names, in the model's dtype"
            )

    def blank(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """As `StageLink.blank`."""
        if self._is_first:
            return super().blank(num_tokens, device)
        return torch.zeros(num_tokens, self._hidden_size, dtype=self._dtype, device=device)


def create_link(placement: Placement, passed: PassedOn, device: torch.device) -> StageLink:
    """The link of one rank, whose process group exists."""
    return OnlyStage() if placement.num_stages == 1 else OneOfStages(placement, passed, device)
