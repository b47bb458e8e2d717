"""Triton kernels that add low-rank adapters: the inner products first, then their way to the outputs.

A program takes some neighbouring rows, and goes through the adapters that they have, most often one in a prompt. What
it takes at a time does not depend on how many rows there are, so neither do the bits of a row: the inner products are
always cut at the same places, and their parts summed in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from dovetail.nn.triton_launch import FP_FUSION

_ROWS = 16
_CHUNK = 512
"""Features of a row that one program multiplies: few rows alone would leave most of a GPU idle."""


@triton.jit
def _adapted_slots(slots, ranks, row, num_rows):
    """The slot of each row, -1 for rows that nothing is added to."""
    slot = tl.load(slots + row, mask=row < num_rows, other=-1)
    rank = tl.load(ranks + slot, mask=slot >= 0, other=0)
    return tl.where(rank > 0, slot, -1)


@triton.jit(do_not_specialize=["num_rows"])
def low_rank_inner_kernel(
    inner,
    x,
    a,
    ranks,
    slots,
    num_rows,
    x_stride,
    width,
    in_features,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A chunk's share of the inner products, float32 [chunks, num_rows, width]; `width`: parts times the highest rank,
    which lie side by side in `a`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    chunk = tl.program_id(2)
    slot = _adapted_slots(slots, ranks, row, num_rows)
    row_places = row.to(tl.int64)[:, None] * x_stride
    sums = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    left = slot
    current = tl.max(left, axis=0)
    while current >= 0:
        is_own = slot == current
        own = a + current.to(tl.int64) * width * in_features
        total = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
        for depth in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, in_features), DEPTH):
            feature = depth + tl.arange(0, DEPTH)
            is_inside = feature < in_features
            rows = tl.load(x + row_places + feature[None, :], mask=is_own[:, None] & is_inside[None, :], other=0.0)
            places = own + column[None, :] * in_features + feature[:, None]
            adapter = tl.load(places, mask=(column < width)[None, :] & is_inside[:, None], other=0.0)
            total = tl.dot(rows, adapter.to(rows.dtype), total, input_precision="ieee")
        sums = tl.where(is_own[:, None], total, sums)
        left = tl.where(left == current, -1, left)
        current = tl.max(left, axis=0)
    places = inner + (chunk.to(tl.int64) * num_rows + row)[:, None] * width + column[None, :]
    tl.store(places, sums, mask=(slot >= 0)[:, None] & (column < width)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def low_rank_outer_kernel(
    y,
    inner,
    b,
    part_starts,
    ranks,
    slots,
    num_rows,
    y_stride,
    num_chunks,
    max_rank,
    out_features,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Adds to some columns of some rows. The inner products stay float32, so the multiplier for narrow numbers does not
    serve here; there are few of them."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    slot = _adapted_slots(slots, ranks, row, num_rows)
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    left = slot
    current = tl.max(left, axis=0)
    while current >= 0:
        is_own = slot == current
        own = b + current.to(tl.int64) * max_rank * out_features
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for part in range(PARTS):
            start, stop = tl.load(part_starts + part), tl.load(part_starts + part + 1)
            if (start < first + COLUMNS) & (stop > first):
                is_part = (column >= start) & (column < stop)
                for begin in range(0, max_rank, RANKS):
                    rank = begin + tl.arange(0, RANKS)
                    is_rank = rank < max_rank
                    factor = tl.zeros([ROWS, RANKS], dtype=tl.float32)
                    for chunk in range(num_chunks):
                        place = (tl.cast(chunk, tl.int64) * num_rows + row)[:, None] * (PARTS * max_rank)
                        place += part * max_rank + rank[None, :]
                        factor += tl.load(inner + place, mask=is_own[:, None] & is_rank[None, :], other=0.0)
                    places = own + rank[:, None] * out_features + column[None, :]
                    adapter = tl.load(places, mask=is_rank[:, None] & is_part[None, :], other=0.0)
                    total = tl.dot(factor, adapter.to(tl.float32), total, input_precision="ieee")
        sums = tl.where(is_own[:, None], total, sums)
        left = tl.where(left == current, -1, left)
        current = tl.max(left, axis=0)
    mask = (slot >= 0)[:, None] & (column < out_features)[None, :]
    places = y + row.to(tl.int64)[:, None] * y_stride + column[None, :]
    before = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, (before + sums).to(y.dtype.element_ty), mask=mask)


def add(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    part_starts: torch.Tensor,
    ranks: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """As `AddsNarrowLowRank.add_low_rank`."""
    num_rows, out_features = y.shape
    _, parts, max_rank, in_features = a.shape
    if x.shape != (num_rows, in_features) or b.shape != (len(a), max_rank, out_features) or len(slots) != num_rows:
        raise ValueError(
            f"rows {list(x.shape)} -> {list(y.shape)} and {len(slots)} slots for adapters {list(a.shape)} and "
            f"{list(b.shape)}"
        )
    if y.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError("the elements of a row must be contiguous")
    if not num_rows:
        return
    width, chunks, row_tiles = parts * max_rank, -(-in_features // _CHUNK), -(-num_rows // _ROWS)
    inner = x.new_empty(chunks, num_rows, width, dtype=torch.float32)
    first, second = inner_sizes(width, x.element_size()), outer_sizes(parts, max_rank)
    first_grid = row_tiles, -(-width // first["WIDTH"]), chunks
    second_grid = row_tiles, -(-out_features // second["COLUMNS"])
    features = num_rows, x.stride(0), width, in_features
    columns = num_rows, y.stride(0), chunks, max_rank, out_features
    low_rank_inner_kernel[first_grid](inner, x, a, ranks, slots, *features, **first, **FP_FUSION)
    low_rank_outer_kernel[second_grid](y, inner, b, part_starts, ranks, slots, *columns, **second, **FP_FUSION)


def inner_sizes(width: int, element_size: int) -> Mapping[str, int]:
    """Constants of `low_rank_inner_kernel`."""
    columns = 16 if width <= 16 else 32 if width <= 32 else 64
    depth = 64 if element_size == 2 else 32
    return {"ROWS": _ROWS, "WIDTH": columns, "DEPTH": depth, "CHUNK": _CHUNK, "num_warps": 4}


def outer_sizes(parts: int, max_rank: int) -> Mapping[str, int]:
    """Constants of `low_rank_outer_kernel`."""
    ranks = 16 if max_rank <= 16 else 32
    return {"PARTS": parts, "ROWS": _ROWS, "COLUMNS": 128, "RANKS": ranks, "num_warps": 8}
