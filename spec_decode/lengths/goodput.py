"""How many drafts of each request to verify: the choice that yields the most tokens per second.

Liu et al. 2024, "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (SmartSpec, arXiv
2406.14066), section 4, with a length per request instead of one for the batch, and measured costs in place of a fitted
line.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Gains = Sequence[float]
"""Expected tokens that each further draft of one request adds, in the order of its nodes."""


def choose_lengths(
    gains: Sequence[Gains],
    num_tokens: float,
    seconds: NDArray[np.float64],
    margin: float = 0.0,
    most: int | None = None,
) -> tuple[list[int], float]:
    """The number of drafts of each request that maximises (expected tokens of the step) / (its seconds).

    Exact where the gains of each request do not rise, as those of a chain never do. Where they rise (a tree's second
    node may be likelier than its first), only lengths on the upper hull of the summed gains are looked at.

    Args:
        gains: of each request; its length is the most drafts that it can have.
        num_tokens: expected tokens of the step without any of these drafts.
        seconds: [at least sum of lengths + 1]: of the step with 0, 1, ... of these drafts.
        margin: no draft is verified unless tokens per second rise by more than this share.
        most: drafts of all requests together; None: as many as there are.

    Returns:
        Drafts per request, and the factor by which tokens per second are expected to rise: 1.0 where all are 0.
    """
    lengths = [0] * len(gains)
    pieces = [(slope, request, size) for request, own in enumerate(gains) for size, slope in _hull(own)]
    # A stable sort keeps the pieces of one request, whose slopes fall, in their order.
    pieces.sort(key=_slope, reverse=True)
    costs = seconds.tolist()
    plain = num_tokens / costs[0]
    best_rate, best, count, tokens = plain * (1 + margin), 0, 0, num_tokens
    for place, (slope, _, size) in enumerate(pieces, 1):
        count += size
        if most is not None and count > most:
            break
        tokens += size * slope
        if tokens / costs[count] > best_rate:
            best_rate, best = tokens / costs[count], place
    for _, request, size in pieces[:best]:
        lengths[request] += size
    return lengths, best_rate / plain if best else 1.0


def _slope(piece: tuple[float, int, int]) -> float:
    return piece[0]


def _hull(gains: Gains) -> list[tuple[int, float]]:
    """Pieces (number of drafts, mean gain) of the upper hull of the summed gains, with falling means."""
    pieces: list[tuple[int, float]] = []
    for gain in gains:
        size, slope = 1, float(gain)
        while pieces and pieces[-1][1] < slope:
            last_size, last_slope = pieces.pop()
            slope = (last_size * last_slope + size * slope) / (last_size + size)
            size += last_size
        pieces.append((size, slope))
    return pieces
