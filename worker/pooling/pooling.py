"""The requests of a worker that are pooled: their states from step to step, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.contracts.errors import DovetailError
from dovetail.contracts.pooling import Pooler, PoolingState
from dovetail.contracts.pooling_params import PooledStates, PoolingParams
from dovetail.contracts.step import NewRequest
from dovetail.worker.computed_step import ComputedStep
from dovetail.worker.pooling.result import pooled_states


@dataclass(slots=True)
class _Pooled:
    """One request."""

    params: PoolingParams
    num_tokens: int
    pooler: Pooler | None
    """None on a rank that does not answer."""
    state: PoolingState | None = None
    error: str | None = None
    """Why it failed; it waits for its last step, so that all ranks go on alike."""


class PoolingRequests:
    """Those that are in the batch. All ranks know them, since nothing is sampled for them; the rank that answers pools
    them."""

    def __init__(self, poolers: Mapping[str, Pooler]):
        """`poolers`: by task; empty on ranks that do not answer."""
        self._poolers = poolers
        self._requests: dict[int, _Pooled] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._requests)

    def add(self, request: NewRequest) -> None:
        """Takes in a request that comes, or comes back, if it is to be pooled."""
        params = request.pooling
        if params is None:
            return
        assert params.task is not None, "the engine settles the task"
        pooler = self._poolers.get(params.task)
        entry = self._requests[request.seq_id] = _Pooled(params, request.num_prompt_tokens, pooler)
        if pooler is not None:
            try:
                entry.state = pooler.start(entry.num_tokens)
            except Exception as error:
                entry.error = _message(pooler, error)

    def remove(self, seq_id: int) -> None:
        """A request leaves; unknown ones are passed over."""
        self._requests.pop(seq_id, None)

    def among(self, seq_ids: Sequence[int]) -> np.ndarray:
        """bool [R]: which of the requests are pooled."""
        return np.array([seq_id in self._requests for seq_id in seq_ids], dtype=bool)

    def pool(self, step: ComputedStep) -> dict[int, PooledStates]:
        """Hands the states of a step over. Returns the results by batch index, and notes in `step.failed` what cannot
        be had."""
        results = {}
        for index, seq_id in enumerate(step.plan.seq_ids):
            entry = self._requests.get(seq_id)
            if entry is None or entry.pooler is None:
                continue
            self._add_states(entry, step, index)
            if step.inputs.reaches_end[index]:
                result = self._result(entry)
                if result is not None:
                    results[index] = result
                else:
                    step.failed[index] = str(entry.error)
        return results

    def _add_states(self, entry: _Pooled, step: ComputedStep, index: int) -> None:
        if entry.state is None or entry.pooler is None or entry.error is not None:
            return
        start, stop = (int(step.inputs.query_start[i]) for i in (index, index + 1))
        end = int(step.inputs.seq_lens[index])
        try:
            entry.state.add(step.hidden[start:stop], range(end - (stop - start), end))
        except Exception as error:
            entry.error = _message(entry.pooler, error)

    def _result(self, entry: _Pooled) -> PooledStates | None:
        if entry.state is None or entry.pooler is None or entry.error is not None:
            return None
        try:
            finished: torch.Tensor = entry.state.finish()
            return pooled_states(finished, entry.params, entry.pooler.setup.need, entry.num_tokens)
        except Exception as error:
            entry.error = _message(entry.pooler, error)
            return None


def _message(pooler: Pooler, error: Exception) -> str:
    what = str(error) if isinstance(error, DovetailError) else f"{type(error).__name__}: {error}"
    return f"pooler {type(pooler).__name__} failed the request: {what}"
