"""Log probabilities of tokens that requests got: of the model's raw distribution, or of the one that was drawn from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.contracts.step import TokenLogprobs
from dovetail.nn.host_copies import on_device
from dovetail.worker.sampling.draw import DrawParams
from dovetail.worker.sampling.temperature import kept_weights, lowest_kept, row_sums, scaled_logits

_ROWS = 32
"""At a time: bounds the temporaries, of which there are some of the vocabulary's size per row."""


def token_logprobs(
    logits: Tensor, token_ids: NDArray[np.int64], num_top: NDArray[np.int64] | int
) -> list[TokenLogprobs]:
    """The log probability and rank of one token per row, and the most likely tokens: of the raw distribution, before
    any mask, penalty or temperature.

    Args:
        logits: [n, vocab_size], any float type; the softmax is taken in float32.
        token_ids: int64 [n], the output tokens.
        num_top: alternatives reported for each row; -1: the whole vocabulary.

    Returns:
        One entry per row, alternatives by falling probability. A token's rank is 1 plus the number of tokens that are
        strictly more likely.
    """
    entries: dict[int, TokenLogprobs] = {}
    for part, count in _groups(token_ids, num_top):
        selected = logits[on_device(part, logits.device)]
        log_probs = selected.float().log_softmax(-1)
        entries |= zip(part.tolist(), _entries(log_probs, token_ids[part], count), strict=True)
    return [entries[row] for row in range(len(token_ids))]


def processed_logprobs(
    logits: Tensor, params: DrawParams | None, token_ids: NDArray[np.int64], num_top: NDArray[np.int64] | int
) -> list[TokenLogprobs]:
    """As `token_logprobs`, of the distribution from which the tokens were drawn, with the mass that min_p, top_k and
    top_p left of the distribution after temperature.

    Alternatives are tokens that could have been drawn. A token that was drawn counts as kept, with all that are as
    likely or likelier, also where another set of operators, or a lossy acceptance rule, drew the line elsewhere. For
    greedy rows, the token alone is kept, of the distribution at temperature 1.

    Args:
        logits: [n, vocab_size], any float type, after `Sampler.edited`.
        params: of the rows that are not greedy, numbered among the n, on the host; None: all are.
        token_ids: int64 [n], the output tokens.
        num_top: alternatives reported for each row at most; -1: all that could have been drawn.
    """
    truncation = _Truncation.of(params, *logits.shape)
    entries: dict[int, TokenLogprobs] = {}
    for part, count in _groups(token_ids, num_top):
        tokens = on_device(token_ids[part], logits.device)
        selected = logits[on_device(part, logits.device)].float()
        log_probs, mass = truncation.rows(part).log_probs(selected, tokens)
        found = _entries(log_probs, token_ids[part], count)
        for row, entry, surviving in zip(part.tolist(), found, mass.tolist(), strict=True):
            num_kept = sum(logprob > -np.inf for logprob in entry.top_logprobs)
            top_ids, top_logprobs = entry.top_ids[:num_kept], entry.top_logprobs[:num_kept]
            entries[row] = TokenLogprobs(entry.token_id, entry.logprob, entry.rank, top_ids, top_logprobs, surviving)
    return [entries[row] for row in range(len(token_ids))]


@dataclass(frozen=True, slots=True)
class _Truncation:
    """How each of n rows is cut: tensors [n], on the host."""

    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    is_greedy: Tensor

    @classmethod
    def of(cls, params: DrawParams | None, num_rows: int, vocab_size: int) -> _Truncation:
        """`params` as for `processed_logprobs`."""
        found = cls(
            temperature=torch.ones(num_rows),
            min_p=torch.zeros(num_rows),
            top_k=torch.full((num_rows,), vocab_size),
            top_p=torch.ones(num_rows, dtype=torch.float64),
            is_greedy=torch.ones(num_rows, dtype=torch.bool),
        )
        if params is not None:
            found.temperature[params.rows] = params.temperature
            found.min_p[params.rows] = params.min_p
            found.top_k[params.rows] = params.top_k
            found.top_p[params.rows] = params.top_p
            found.is_greedy[params.rows] = False
        return found

    def rows(self, chosen: NDArray[np.int64]) -> _Truncation:
        """Of some rows."""
        rows = torch.from_numpy(chosen)
        fields = (self.temperature, self.min_p, self.top_k, self.top_p, self.is_greedy)
        return _Truncation(*(values[rows] for values in fields))

    def log_probs(self, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities, -inf for what is cut, and the mass that is left: float32 [n, vocab_size], float64 [n].

        Args:
            logits: float32 [n, vocab_size].
            token_ids: int64 [n], what was drawn, on the device of the logits.
        """
        device = logits.device
        scaled = scaled_logits(logits, self.temperature.to(device))
        top_k, top_p = self.top_k.to(device), self.top_p.to(device)
        floor = lowest_kept(scaled, self.min_p.to(device), top_k, top_p)
        drawn = scaled.gather(1, token_ids[:, None])
        floor = torch.minimum(floor, drawn[:, 0])
        total, left = row_sums(scaled.exp()), row_sums(kept_weights(scaled, floor))
        is_cut = scaled < floor[:, None]
        if self.is_greedy.any():
            greedy = self.is_greedy.nonzero()[:, 0].to(device)
            left[greedy] = drawn[greedy, 0].exp().double()
            is_cut[greedy] = True
            is_cut[greedy, token_ids[greedy]] = False
        log_probs = (scaled - left.log().float()[:, None]).masked_fill_(is_cut, -torch.inf)
        return log_probs, (left / total).clamp(max=1.0)


def _groups(token_ids: NDArray[np.int64], num_top: NDArray[np.int64] | int) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Rows that want equally many alternatives, some at a time, with that number."""
    wanted = np.broadcast_to(np.asarray(num_top, dtype=np.int64), token_ids.shape)
    for count in np.unique(wanted):
        rows = np.flatnonzero(wanted == count)
        for start in range(0, len(rows), _ROWS):
            yield rows[start : start + _ROWS], int(count)


def _entries(log_probs: Tensor, token_ids: NDArray[np.int64], num_top: int) -> list[TokenLogprobs]:
    chosen = log_probs.gather(1, on_device(token_ids, log_probs.device)[:, None])
    # Counted as floats (exact below 2**24), which CPUs sum much faster than booleans.
    is_higher = torch.gt(log_probs, chosen, out=torch.empty_like(log_probs))
    ranks = is_higher.sum(-1).long() + 1
    vocab_size = log_probs.shape[1]
    top = log_probs.topk(vocab_size if num_top < 0 else min(num_top, vocab_size), dim=-1)
    columns = (token_ids.tolist(), chosen[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist())
    return [TokenLogprobs(*values) for values in zip(*columns, strict=True)]
