"""Which rows of a step are whole sequences, for layers whose queries see all keys of their own request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class EqualSequences:
    """Sequences of one length."""

    rows: slice | torch.Tensor
    """Their tokens in the step: all of the first sequence, all of the second, ...; int64 where they are no run."""
    count: int
    length: int


def by_length(query_start: np.ndarray, device: str) -> list[EqualSequences]:
    """The sequences of a step, int32 [R + 1] as `AttentionBatch.query_start`, by their length: shortest first."""
    starts, lengths = query_start[:-1].astype(np.int64), np.diff(query_start)
    groups = []
    for length in np.unique(lengths).tolist():
        first = starts[lengths == length]
        is_run = bool((np.diff(first) == length).all())
        rows: slice | torch.Tensor = slice(int(first[0]), int(first[-1]) + length)
        if not is_run:
            rows = torch.tensor((first[:, None] + np.arange(length)).ravel(), device=device)
        groups.append(EqualSequences(rows, len(first), length))
    return groups
