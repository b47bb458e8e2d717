"""From what a pooler finished to the result of a request: dimensions, length, activation."""

from __future__ import annotations

import numpy as np
import torch

from dovetail.contracts.errors import PluginError
from dovetail.contracts.pooling import PoolerNeed
from dovetail.contracts.pooling_params import CLASSIFY, EMBED, LABEL_TASKS, PooledStates, PoolingParams


def pooled_states(finished: torch.Tensor, params: PoolingParams, need: PoolerNeed, num_tokens: int) -> PooledStates:
    """The result of one request. Raises `PluginError` for a tensor whose shape is not the task's."""
    width = need.num_labels if need.task in LABEL_TASKS else need.hidden_size
    expected = (width,) if need.task in (EMBED, CLASSIFY) else (num_tokens, width)
    if not isinstance(finished, torch.Tensor) or finished.shape != expected:
        found = tuple(finished.shape) if isinstance(finished, torch.Tensor) else type(finished).__name__
        raise PluginError(f"its finish() returned {found} for {need.task}, which is a tensor of shape {expected}")
    result = finished.float()
    result = _activated(result, params) if need.task in LABEL_TASKS else _embedding(result, params)
    host = result.cpu().contiguous().numpy().astype("<f4", copy=False)
    if not np.isfinite(host).all():
        raise PluginError("its result is not finite: the model computed NaN or infinity, or the pooler did")
    return PooledStates(shape=tuple(host.shape), data=host.tobytes())


def _embedding(states: torch.Tensor, params: PoolingParams) -> torch.Tensor:
    """[..., hidden_size] -> [..., dimensions], of length 1 where that is asked for."""
    kept = states[..., : params.dimensions]
    if params.normalize is False:
        return kept
    return torch.nn.functional.normalize(kept, dim=-1)


def _activated(scores: torch.Tensor, params: PoolingParams) -> torch.Tensor:
    """[..., num_labels], before and after."""
    if params.use_activation is False:
        return scores
    return scores.sigmoid() if scores.shape[-1] == 1 else scores.softmax(-1)
