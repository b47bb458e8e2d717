"""Tensor functions between logits and tokens: temperature, truncation, and the draw.

Every function treats each row by itself, with sums in an order that does not depend on how many rows there are, so
that a request draws the same token in any batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_ENTRIES_ON_CPU = 2**20
"""Temporaries of 4 MiB: larger ones are mapped anew each time, and the page faults cost more than the arithmetic."""
_ENTRIES = 2**24
"""Elsewhere of 64 MiB. Rows that are truncated take some 60 bytes an entry where they are sorted whole: one GiB, while
the rows of a verify step taken at once would take that many times over."""
_BLOCK = 256
_CANDIDATES = (64, 1024, 8192)
"""How many of the highest logits are tried before a row is sorted whole: models are sure of most tokens, and the
highest 64 of 49,152 cost a thirtieth of a sort."""


@dataclass(frozen=True)
class Truncation:
    """What is kept of each row's distribution; one entry per row, on the device of the logits."""

    temperature: Tensor
    """float32 [n], above 0."""
    min_p: Tensor
    """float32 [n]: least probability relative to the most likely token's; 0 keeps all."""
    top_k: Tensor
    """int64 [n], at least 1; the vocabulary's size (or more) keeps all."""
    top_p: Tensor
    """float64 [n] in (0, 1]; 1 keeps all."""


def row_groups(count: int, logits: Tensor) -> Iterator[tuple[int, int]]:
    """Start and end of groups of `count` rows, which are as wide as those of `logits` and on its device. What is
    computed group by group takes temporaries that do not grow with the number of rows."""
    most = _ENTRIES_ON_CPU if logits.device.type == "cpu" else _ENTRIES
    step = max(1, most // logits.shape[1])
    for start in range(0, count, step):
        yield start, min(start + step, count)


def truncated_weights(logits: Tensor, truncation: Truncation, truncated: Tensor | None) -> Tensor:
    """Probabilities up to a factor, after temperature, min_p, top_k and top_p in this order.

    Tokens that tie with the last one kept are kept as well, so the result does not depend on a sorting order.
    top_p counts the probability that min_p and top_k have left.

    Args:
        logits: float32 [n, vocab_size]; -inf for tokens that cannot be drawn.
        truncation: parameters of the rows.
        truncated: int64 [m], the rows that top_k or top_p shorten; None where there is no such row.

    Returns:
        float32 [n, vocab_size]; the most likely token has weight 1. Rows with NaN, +inf or nothing but -inf hold NaN.
    """
    # Relative to the highest, a small temperature underflows to 0 instead of overflowing.
    scaled = (logits - logits.amax(-1, keepdim=True)) / truncation.temperature[:, None]
    floor = truncation.min_p.log()
    if truncated is not None:
        floor = floor.index_copy(0, truncated, _floors(scaled, floor, truncation, truncated))
    return _kept(scaled, floor)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row by inverting the cumulative distribution.

    Args:
        weights: float32 [n, vocab_size], not negative, at least one positive in each row; need not sum to 1.
        uniforms: float64 [n] in [0, 1).

    Returns:
        int64 [n]. Never a token of weight 0.
    """
    blocks = _blocks(weights)
    masses = blocks.sum(-1)
    block, rest = _invert(masses, uniforms)
    inner = blocks[torch.arange(len(blocks), device=blocks.device), block]
    token, _ = _invert(inner, rest)
    return block * _BLOCK + token


def normalized(weights: Tensor) -> Tensor:
    """Rows divided by their sums: float32 [n, vocab_size]."""
    return weights / _row_sums(weights).to(weights.dtype)[:, None]


def _floors(scaled: Tensor, floor: Tensor, truncation: Truncation, rows: Tensor) -> Tensor:
    """For each of `rows`, the smallest scaled logit that min_p, top_k and top_p keep: float32 [len(rows)]."""
    vocab_size = scaled.shape[1]
    result = floor[rows]
    pending = torch.arange(len(rows), device=scaled.device)
    for size in (*_CANDIDATES, vocab_size):
        if len(pending) == 0:
            break
        index = rows[pending]
        selected = scaled if len(index) == len(scaled) else scaled[index]
        whole = size >= vocab_size
        highest = selected.sort(-1, descending=True).values if whole else selected.topk(size, dim=-1).values
        floors, found = _floors_within(
            highest, selected, floor[index], truncation.top_k[index].clamp(max=vocab_size), truncation.top_p[index]
        )
        found |= whole
        result[pending[found]] = floors[found]
        pending = pending[~found]
    return result


def _floors_within(
    highest: Tensor, scaled: Tensor, floor: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Floors as far as the `highest` logits of each row tell, and whether they tell: float32 [m], bool [m]."""
    size, vocab_size = highest.shape[1], scaled.shape[1]
    kth = highest.gather(1, (top_k.clamp(max=size) - 1)[:, None])[:, 0]
    floor = torch.where(top_k < vocab_size, torch.maximum(kth, floor), floor)
    found = (top_k <= size) | (top_k == vocab_size)
    if bool((top_p == 1).all()):
        return floor, found
    wanted = top_p * _row_sums(_kept(scaled, floor))
    reached = _kept(highest, floor).double().cumsum(-1) >= wanted[:, None]
    last = _first(reached)
    nucleus = highest.gather(1, last.clamp(max=size - 1)[:, None])[:, 0]
    is_full = top_p == 1
    return torch.where(is_full, floor, torch.maximum(nucleus, floor)), found & (is_full | (last < size))


def _kept(scaled: Tensor, floor: Tensor) -> Tensor:
    """exp(scaled) where it is not below `floor`, else 0."""
    # A comparison that writes floats, then a product: on CPU eight times faster than masked_fill.
    keep = torch.empty_like(scaled)
    torch.ge(scaled, floor[:, None], out=keep)
    return keep.mul_(scaled.exp())


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first column whose cumulative weight exceeds uniform * total, and how far into that column it lies, as
    another number in [0, 1]."""
    cumulative = weights.double().cumsum(-1)
    target = uniforms * cumulative[:, -1]
    positive = weights > 0
    columns = torch.arange(weights.shape[1], device=weights.device)
    last_positive = torch.where(positive, columns, 0).amax(-1)
    # Parallel sums on GPUs need not be monotonic, so a column of weight 0 is ruled out by name.
    column = torch.minimum(_first(positive & (cumulative > target[:, None])), last_positive)
    mass = weights.gather(1, column[:, None])[:, 0].double()
    before = cumulative.gather(1, column[:, None])[:, 0] - mass
    return column, ((target - before) / mass).clamp(0.0, 1.0)


def _first(marks: Tensor) -> Tensor:
    """Index of the first True in each row, the row's length where there is none: int64 [n]."""
    width = marks.shape[1]
    return torch.where(marks, torch.arange(width, device=marks.device), width).amin(-1)


def _blocks(weights: Tensor) -> Tensor:
    """[n, ceil(vocab_size / 256), 256], padded with zeros."""
    padding = -weights.shape[1] % _BLOCK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    return weights.view(len(weights), -1, _BLOCK)


def _row_sums(weights: Tensor) -> Tensor:
    """float64 [n]. By blocks: a plain sum over one long row is split among threads, over several rows it is not."""
    return _blocks(weights).sum(-1).double().sum(-1)
