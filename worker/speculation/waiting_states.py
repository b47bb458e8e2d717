"""States of the target that a drafter has not been handed yet.

A drafter with state of its own is to see every position that the target computes. While it is asked for no drafts, it
need not see each one at once: many positions in one call take hardly longer than one, as with a prompt. Its pages are
shared with other requests by whole KV blocks, so it is called when one is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dovetail.nn.host_copies import on_device

States = tuple[torch.Tensor | None, torch.Tensor | None]
"""The last states and those between layers, as `DraftBatch` holds them; None where the drafter wants none."""


@dataclass(frozen=True, slots=True)
class Span:
    """Positions of one request that its drafter is to read."""

    first_position: int
    rows: np.ndarray
    """int64 [positions]: the row of each position's state in the `States` that the drafter is handed."""


@dataclass(slots=True)
class _Waiting:
    first_position: int
    rows: list[int] = field(default_factory=list)
    """Of the states that wait, in order of position."""


class WaitingStates:
    """Of one drafter."""

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._steps: list[States] = []
        self._num_rows = 0
        self._requests: dict[int, _Waiting] = {}

    @property
    def num_steps(self) -> int:
        """Steps whose states wait."""
        return len(self._steps)

    def may_wait(self, positions: Sequence[int]) -> bool:
        """Whether a step that computed one token of each request, at these positions, can wait."""
        return all((position + 1) % self._block_size for position in positions)

    def keep(self, seq_ids: Sequence[int], rows: Sequence[int], positions: Sequence[int], states: States) -> None:
        """Keeps the rows of a step's states that are those of `seq_ids`, one each."""
        self._steps.append(_taken(states, rows))
        for offset, (seq_id, position) in enumerate(zip(seq_ids, positions, strict=True)):
            waiting = self._requests.get(seq_id)
            # A request that gave way to others may come back at another place.
            if waiting is None or waiting.first_position + len(waiting.rows) != position:
                waiting = self._requests[seq_id] = _Waiting(position)
            waiting.rows.append(self._num_rows + offset)
        self._num_rows += len(seq_ids)

    def join(self, seq_id: int, computed: Span) -> Span:
        """The positions of a request that its drafter has not seen, with rows of what `join_states` returns.
        `computed`: those of this step, with rows of its states."""
        waiting = self._requests.get(seq_id)
        rows = computed.rows + self._num_rows
        if waiting is None or waiting.first_position + len(waiting.rows) != computed.first_position:
            return Span(computed.first_position, rows)
        return Span(waiting.first_position, np.concatenate([np.array(waiting.rows, dtype=np.int64), rows]))

    def join_states(self, states: States, seq_ids: Sequence[int]) -> States:
        """What waits and this step's states, one behind the other. Nothing waits any longer but states of requests
        that are not among `seq_ids`, those of the step."""
        if not self._steps:
            return states
        waiting = _joined(self._steps)
        self._requests = {seq_id: request for seq_id, request in self._requests.items() if seq_id not in seq_ids}
        rows = [row for request in self._requests.values() for row in request.rows]
        self._steps, self._num_rows = [_taken(waiting, rows)] if rows else [], len(rows)
        new_rows = iter(range(len(rows)))
        for request in self._requests.values():
            request.rows = [next(new_rows) for _ in request.rows]
        return _joined([waiting, states])

    def forget(self, seq_id: int) -> None:
        """A request ended, or its drafter failed it."""
        self._requests.pop(seq_id, None)


def _taken(states: States, rows: Sequence[int]) -> States:
    """Copies: what a step computes is overwritten by the next."""
    indices = np.array(rows, dtype=np.int64)
    last, layers = (None if part is None else part[on_device(indices, part.device)] for part in states)
    return last, layers


def _joined(steps: Sequence[States]) -> States:
    last, layers = ([part for part in kind if part is not None] for kind in zip(*steps, strict=True))
    return torch.cat(last) if last else None, torch.cat(layers) if layers else None
