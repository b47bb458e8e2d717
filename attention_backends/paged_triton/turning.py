"""The turn of queries and keys of int8 pages, which `dovetail.contracts.kv.SCALE_BYTES` describes."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn(vectors, NUM_VECTORS: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr):
    """[NUM_VECTORS, HEAD_PAD] -> the same in float32, runs of elements multiplied by an orthonormal Hadamard matrix.

    Elements from HEAD on are zeros, and stay so: a run, which divides HEAD, has none of both.
    """
    RUN: tl.constexpr = 64 if (HEAD & -HEAD) > 64 else (HEAD & -HEAD)
    turned = vectors.to(tl.float32)
    for stage in tl.static_range(6):
        if 2**stage < RUN:
            pairs = tl.reshape(turned, [NUM_VECTORS * HEAD_PAD // 2 ** (stage + 1), 2, 2**stage])
            first, second = tl.split(tl.permute(pairs, (0, 2, 1)))
            turned = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
    return tl.reshape(turned, [NUM_VECTORS, HEAD_PAD]) * (1.0 / RUN**0.5)
