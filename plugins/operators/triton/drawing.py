"""A Triton kernel that draws tokens after temperature, min_p, top_k and top_p, without sorting.

Logits relative to the highest are at most 0, so the bits of their magnitude order them: 0 is the most likely token. The
last token kept is the smallest magnitude whose count (top_k) or weight (top_p) up to there suffices; it is found by
looking at 16 candidates in each pass over the row, eight passes for all 32 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)
"""Bits of the magnitude of -inf: nothing is less likely."""


@triton.jit
def _magnitudes(logits, start, vocab_size, highest, temperature, BLOCK: tl.constexpr):
    """Bits of the magnitudes of one block, and the weights of its tokens; those behind the row's end weigh nothing."""
    columns = start + tl.arange(0, BLOCK)
    values = tl.load(logits + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
    scaled = (values - highest) / temperature
    bits = tl.abs(scaled).to(tl.int32, bitcast=True)
    return bits, tl.where(columns < vocab_size, tl.exp(scaled), 0.0)


@triton.jit
def _search(
    logits, vocab_size, highest, temperature, most, wanted, COUNT: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr
):
    """The smallest magnitude, at most `most`, such that tokens up to there number (COUNT), or weigh, `wanted`."""
    low = tl.full((), -1, dtype=tl.int32)
    high = tl.full((), 0, dtype=tl.int32) + most
    ways = tl.arange(0, WAYS)
    while high - low > 1:
        step = (high - low + WAYS - 1) // WAYS
        candidates = tl.minimum(low.to(tl.int64) + step.to(tl.int64) * (ways + 1), high).to(tl.int32)
        reached = tl.zeros([WAYS], dtype=tl.float64)
        for start in range(0, vocab_size, BLOCK):
            bits, weights = _magnitudes(logits, start, vocab_size, highest, temperature, BLOCK)
            inside = start + tl.arange(0, BLOCK) < vocab_size
            part = tl.where(inside, 1.0, 0.0) if COUNT else weights
            within = bits[None, :] <= candidates[:, None]
            reached += tl.sum(tl.where(within, part[None, :], 0.0), axis=1).to(tl.float64)
        short = tl.sum((reached < wanted).to(tl.int32), axis=0)
        # The last candidate is `high` itself, which suffices; sums that round differently must not pass it.
        short = tl.minimum(short, WAYS - 1)
        next_high = tl.minimum(low.to(tl.int64) + step.to(tl.int64) * (short + 1), high).to(tl.int32)
        low = (low.to(tl.int64) + step.to(tl.int64) * short).to(tl.int32)
        low = tl.minimum(low, next_high - 1)
        high = next_high
    return high


@triton.jit
def _total(logits, vocab_size, highest, temperature, most, BLOCK: tl.constexpr):
    """The weight of all tokens up to a magnitude."""
    total = tl.zeros([1], dtype=tl.float64)
    for start in range(0, vocab_size, BLOCK):
        bits, weights = _magnitudes(logits, start, vocab_size, highest, temperature, BLOCK)
        total += tl.sum(tl.where(bits <= most, weights, 0.0), axis=0).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def draw_kernel(
    tokens,
    logits,
    row_stride,
    temperatures,
    floors,
    top_ks,
    top_ps,
    uniforms,
    vocab_size,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
):
    """One row per program. `floors`: int32, the magnitude that min_p allows."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    temperature = tl.load(temperatures + row)
    most = tl.load(floors + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    highest = tl.full([1], -float("inf"), dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
        highest = tl.maximum(highest, tl.max(values, axis=0))
    highest = tl.max(highest, axis=0)
    if top_k < vocab_size:
        wanted = top_k.to(tl.float64)
        kth = _search(logits, vocab_size, highest, temperature, INFINITY, wanted, True, BLOCK, WAYS)
        most = tl.minimum(most, kth)
    if top_p < 1.0:
        wanted = top_p * _total(logits, vocab_size, highest, temperature, most, BLOCK)
        most = _search(logits, vocab_size, highest, temperature, most, wanted, False, BLOCK, WAYS)
    target = tl.load(uniforms + row) * _total(logits, vocab_size, highest, temperature, most, BLOCK)
    before = tl.zeros([1], dtype=tl.float64)
    drawn = tl.full([1], vocab_size, dtype=tl.int32)
    last = tl.zeros([1], dtype=tl.int32)
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        bits, weights = _magnitudes(logits, start, vocab_size, highest, temperature, BLOCK)
        weights = tl.where(bits <= most, weights, 0.0)
        cumulative = before + tl.cumsum(weights.to(tl.float64), axis=0)
        hits = (cumulative > target) & (weights > 0)
        drawn = tl.minimum(drawn, tl.min(tl.where(hits, columns, vocab_size), axis=0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0, columns, 0), axis=0))
        before += tl.sum(weights.to(tl.float64), axis=0)
    # Where rounding leaves the target unreached, the last token that was kept.
    token = tl.where(drawn < vocab_size, drawn, last)
    tl.store(tokens + row + tl.arange(0, 1), token.to(tl.int64))
