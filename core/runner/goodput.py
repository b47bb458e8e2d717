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
    gains: Sequence[Gains], num_tokens: float, seconds: NDArray[np.float64], margin: float = 0.0
) -> tuple[list[int], float]:
    """The number of drafts of each request that maximises (expected tokens of the step) / (its seconds).

    Exact where the gains of each request do not rise, as those of a chain never do. Where they rise (a tree's second
    node may be likelier than its first), only lengths on the upper hull of the summed gains are looked at.

    Args:
        gains: of each request; its length is the most drafts that it can have.
        num_tokens: expected tokens of the step without any of these drafts.
        seconds: [at least sum of lengths + 1]: of the step with 0, 1, ... of these drafts.
        margin: no draft is verified unless tokens per second rise by more than this share.

    Returns:
        Drafts per request, and the factor by which tokens per second are expected to rise: 1.0 where all are 0.
    """
    owners: list[int] = []
    sizes: list[int] = []
    slopes: list[float] = []
    for request, own in enumerate(gains):
        for size, slope in _hull(own):
            owners.append(request)
            sizes.append(size)
            slopes.append(slope)
    lengths = [0] * len(gains)
    if not owners:
        return lengths, 1.0
    # A stable sort keeps the pieces of one request, whose slopes fall, in their order.
    order = np.argsort(-np.array(slopes), kind="stable")
    count = np.cumsum(np.array(sizes)[order])
    tokens = num_tokens + np.cumsum((np.array(sizes) * np.array(slopes))[order])
    rates = tokens / seconds[count]
    best = int(rates.argmax())
    plain = num_tokens / float(seconds[0])
    factor = float(rates[best]) / plain if plain > 0 else float("inf")
    if factor <= 1 + margin:
        return lengths, 1.0
    for piece in order[: best + 1].tolist():
        lengths[owners[piece]] += sizes[piece]
    return lengths, factor


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
