"""A Triton kernel that draws tokens after temperature, min_p, top_k and top_p, without sorting.

Logits relative to the highest are at most 0, so the bits of their magnitude order them: 0 is the most likely token. The
last token kept is the smallest magnitude whose count (top_k) or weight (top_p) up to there suffices; it is found by
looking at WAYS candidates in each pass over the row.

A pass sums in lanes: lane i has every BLOCK-th token from i on, and all lanes are added up once, behind the pass. An
exchange between threads for each block of the row would cost more than the sums themselves. `_total` adds in the same
order as `_search`, so the weight of all tokens that top_p looks at has the bits of their total.
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
def _highest(logits, vocab_size, BLOCK: tl.constexpr):
    """The highest logit of a row."""
    lanes = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, mask=columns < vocab_size, other=-float("inf")).to(tl.float32)
        lanes = tl.maximum(lanes, values)
    return tl.max(lanes, axis=0)


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
        lanes = tl.zeros([WAYS, BLOCK], dtype=tl.float32)
        for start in range(0, vocab_size, BLOCK):
            bits, weights = _magnitudes(logits, start, vocab_size, highest, temperature, BLOCK)
            inside = start + tl.arange(0, BLOCK) < vocab_size
            part = tl.where(inside, 1.0, 0.0) if COUNT else weights
            lanes += tl.where(bits[None, :] <= candidates[:, None], part[None, :], 0.0)
        reached = tl.sum(lanes, axis=1)
        short = tl.sum((reached.to(tl.float64) < wanted).to(tl.int32), axis=0)
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
    lanes = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab_size, BLOCK):
        bits, weights = _magnitudes(logits, start, vocab_size, highest, temperature, BLOCK)
        lanes += tl.where(bits <= most, weights, 0.0)
    return tl.sum(lanes, axis=0).to(tl.float64)


@triton.jit
def _first_beyond(weights, wanted, COUNT: tl.constexpr):
    """The first index at which the cumulative weight exceeds `wanted`, never one of weight 0."""
    places = tl.arange(0, COUNT)
    beyond = (tl.cumsum(weights, axis=0) > wanted) & (weights > 0)
    first = tl.min(tl.where(beyond, places, COUNT), axis=0)
    # Where rounding leaves the wanted weight unreached, the last place that has any.
    last = tl.max(tl.where(weights > 0, places, 0), axis=0)
    return tl.where(first < COUNT, first, last)


@triton.jit
def _drawn(logits, vocab_size, highest, temperature, most, uniform, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """The token at which the cumulative weight exceeds `uniform` of the total: its block, then its place there."""
    blocks = tl.arange(0, BLOCKS)
    masses = tl.zeros([BLOCKS], dtype=tl.float64)
    for start in range(0, vocab_size, BLOCK):
        bits, weights = _magnitudes(logits, start, vocab_size, highest, temperature, BLOCK)
        mass = tl.sum(tl.where(bits <= most, weights, 0.0), axis=0)
        masses = tl.where(blocks == start // BLOCK, mass.to(tl.float64), masses)
    wanted = uniform * tl.sum(masses, axis=0)
    block = _first_beyond(masses, wanted, BLOCKS)
    wanted -= tl.sum(tl.where(blocks < block, masses, 0.0), axis=0)
    bits, weights = _magnitudes(logits, block * BLOCK, vocab_size, highest, temperature, BLOCK)
    kept = tl.where(bits <= most, weights, 0.0).to(tl.float64)
    return block * BLOCK + _first_beyond(kept, wanted, BLOCK)


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
    BLOCKS: tl.constexpr,
    WAYS: tl.constexpr,
):
    """One row per program. `floors`: int32, the magnitude that min_p allows. BLOCKS: no fewer than the row has."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    temperature = tl.load(temperatures + row)
    most = tl.load(floors + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    highest = _highest(logits, vocab_size, BLOCK)
    if top_k < vocab_size:
        wanted = top_k.to(tl.float64)
        kth = _search(logits, vocab_size, highest, temperature, INFINITY, wanted, True, BLOCK, WAYS)
        most = tl.minimum(most, kth)
    if top_p < 1.0:
        wanted = top_p * _total(logits, vocab_size, highest, temperature, most, BLOCK)
        most = _search(logits, vocab_size, highest, temperature, most, wanted, False, BLOCK, WAYS)
    token = _drawn(logits, vocab_size, highest, temperature, most, tl.load(uniforms + row), BLOCK, BLOCKS)
    tl.store(tokens + row, token.to(tl.int64))
