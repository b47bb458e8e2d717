"""Log probabilities as users see them: of the raw distribution, before any mask, penalty or temperature."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.contracts.step import TokenLogprobs

_ROWS = 32
"""At a time: bounds the temporaries, of which there are three of the vocabulary's size per row."""


def token_logprobs(
    logits: Tensor, token_ids: NDArray[np.int64], num_top: NDArray[np.int64] | int
) -> list[TokenLogprobs]:
    """The log probability and rank of one token per row, and the most likely tokens beside it.

    Args:
        logits: [n, vocab_size], any float type; the softmax is taken in float32.
        token_ids: int64 [n], the tokens that stand.
        num_top: alternatives reported for each row; -1: the whole vocabulary.

    Returns:
        One entry per row, alternatives by falling probability. A token's rank is 1 plus the number of tokens that are
        strictly more likely.
    """
    wanted = np.broadcast_to(np.asarray(num_top, dtype=np.int64), token_ids.shape)
    entries: list[TokenLogprobs | None] = [None] * len(token_ids)
    for count in np.unique(wanted):
        places = np.flatnonzero(wanted == count)
        for start in range(0, len(places), _ROWS):
            part = places[start : start + _ROWS]
            index = torch.from_numpy(part).to(logits.device)
            for place, entry in zip(part, _entries(logits[index], token_ids[part], int(count)), strict=True):
                entries[place] = entry
    return [entry for entry in entries if entry is not None]


def _entries(logits: Tensor, token_ids: NDArray[np.int64], num_top: int) -> list[TokenLogprobs]:
    log_probs = logits.float().log_softmax(-1)
    chosen = log_probs.gather(1, torch.from_numpy(token_ids).to(log_probs.device)[:, None])
    # Counted as floats (exact below 2**24), which CPUs sum much faster than booleans.
    is_higher = torch.gt(log_probs, chosen, out=torch.empty_like(log_probs))
    ranks = is_higher.sum(-1).long() + 1
    vocab_size = log_probs.shape[1]
    top = log_probs.topk(vocab_size if num_top < 0 else min(num_top, vocab_size), dim=-1)
    columns = (token_ids.tolist(), chosen[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist())
    return [TokenLogprobs(*values) for values in zip(*columns, strict=True)]
