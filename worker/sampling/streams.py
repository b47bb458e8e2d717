"""Random streams of requests: pure functions of (seed, stream, position, index), with no state to keep or restore.

A number depends on the request's seed and the token's position alone, so a seeded request repeats in any batch, and
goes on after a preemption as if nothing had happened.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

SAMPLE: Final = 1
"""Draws from the target, one per absolute position, whether the step was a plain or a verify step. The bonus (or
recovered) token after drafts comes from it as well: each position is committed once, so no value is used twice, and
drafts that carry no probabilities leave the tokens of a seeded request as they are without speculation."""
DRAFT: Final = 2
"""Draws of a drafter: position is that of the round's first draft, index the number of the draw in the round."""
ACCEPT: Final = 3
"""Decisions about drafts: position is that of the round's first draft, index the number of the node. Rounds start at
different positions, so siblings in a tree and later rounds never share a value."""

# Golden-ratio increment of SplitMix64 (Steele, Lea, Flood 2014), and two odd constants of PCG that keep the words
# of one counter apart.
_GAMMA = 0x9E3779B97F4A7C15
_STREAM_STEP = 0xDA942042E4DD58B5
_POSITION_STEP = 0x5851F42D4C957F2D
_FEW = 16
"""So many draws take less time one by one than as arrays."""
_MASK_64 = (1 << 64) - 1


def seed_word(seed: int) -> np.uint64:
    """The 64 low bits of any Python integer, as the seed that `uniforms` takes."""
    return np.uint64(seed & _MASK_64)


def uniforms(
    seeds: UInt64Array,
    stream: int | NDArray[np.int64],
    positions: NDArray[np.int64],
    indices: NDArray[np.int64] | int = 0,
) -> NDArray[np.float64]:
    """One number in [0, 1) for each entry; arguments broadcast.

    Args:
        seeds: uint64, one per draw.
        stream: `SAMPLE`, `DRAFT` or `ACCEPT`, or an array of these.
        positions: int64, absolute positions in the sequence.
        indices: int64 below 2**32, where one position needs several draws.

    Returns:
        float64 multiples of 2**-53, each a hash of its own arguments: three rounds of SplitMix64's finalizer.
    """
    every = np.broadcast(seeds, stream, positions, indices)
    if every.size <= _FEW:
        return np.array([_hash(*map(int, draw)) for draw in every]).reshape(every.shape)
    # Arrays throughout: numpy warns where scalars overflow, which here is the point.
    words = (np.atleast_1d(part).astype(np.uint64) for part in (seeds, stream, positions, indices))
    found: NDArray[np.float64] = _hash(*words)
    return found


def _hash(seed: Any, stream: Any, position: Any, index: Any) -> Any:
    """The number of one draw from Python's integers, or those of many from arrays of uint64."""
    state = _mix(seed + _GAMMA)
    state = _mix(state + (index << 32 | stream) * _STREAM_STEP)
    state = _mix(state + position * _POSITION_STEP)
    return (state >> 11) * 2.0**-53


def _mix(state: Any) -> Any:
    """Stafford's variant 13 of the 64-bit finalizer of MurmurHash3. The masks do for integers what overflow does for
    arrays."""
    state = state & _MASK_64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK_64
    return state ^ (state >> 31)
