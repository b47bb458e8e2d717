"""What drafters borrow from the sampler: distributions by a request's own parameters, and draws from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dovetail.contracts.sampling import SamplingParams
from dovetail.nn.row_max import row_max
from dovetail.worker.sampling.draw import draw, normalized, row_groups, truncated_weights


def draft_distributions(logits: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    """As `DraftSetup.distributions`."""
    device = logits.device
    drawn = [row for row, params in enumerate(sampling) if not params.is_greedy]
    is_every_row = len(drawn) == len(sampling)
    probs = torch.zeros(logits.shape, dtype=torch.float32, device=device)
    if not is_every_row:
        probs.scatter_(1, row_max(logits)[1][:, None], 1.0)
    for start, end in row_groups(len(drawn), logits):
        rows = slice(start, end) if is_every_row else torch.tensor(drawn[start:end], device=device)
        probs[rows] = _sampled(logits[rows].float(), [sampling[row] for row in drawn[start:end]])
    return probs


def draft_draw(probs: torch.Tensor, uniforms: np.ndarray) -> torch.Tensor:
    """As `DraftSetup.draw`."""
    chosen = torch.from_numpy(np.ascontiguousarray(uniforms, dtype=np.float64)).to(probs.device)
    if not len(probs):
        return torch.empty(0, dtype=torch.int64, device=probs.device)
    return torch.cat([draw(probs[start:end], chosen[start:end]) for start, end in row_groups(len(probs), probs)])


def _sampled(logits: torch.Tensor, sampling: Sequence[SamplingParams]) -> torch.Tensor:
    device, vocab_size = logits.device, logits.shape[1]
    top_k = [params.top_k if 0 < params.top_k < vocab_size else vocab_size for params in sampling]
    weights = truncated_weights(
        logits,
        temperature=torch.tensor([params.temperature for params in sampling], device=device),
        min_p=torch.tensor([params.min_p for params in sampling], device=device),
        top_k=torch.tensor(top_k, device=device),
        top_p=torch.tensor([params.top_p for params in sampling], dtype=torch.float64, device=device),
        is_truncated=min(top_k) < vocab_size or min(params.top_p for params in sampling) < 1,
    )
    return normalized(weights)
