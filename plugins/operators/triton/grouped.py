"""A Triton kernel for the experts of a mixture: many products of different heights in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grouped_linear_kernel(
    out,
    x,
    weight,
    starts,
    in_features,
    out_features,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILES: tl.constexpr,
):
    """A tile of one group's product. Programs (group, column tile) walk down the rows of their group, TILES of them
    side by side, so that the grid does not depend on how many rows each group has."""
    group = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(starts + group)
    last = tl.load(starts + group + 1)
    column_mask = column < out_features
    weight += group.to(tl.int64) * out_features * in_features
    row_start = first + tl.program_id(2) * ROWS
    while row_start < last:
        row = row_start + tl.arange(0, ROWS)
        row_mask = row < last
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        # Groups start anywhere; from there on, 32-bit offsets reach far enough.
        rows_of_x = x + row_start.to(tl.int64) * in_features
        row_places = tl.arange(0, ROWS)[:, None] * in_features
        column_places = column[None, :] * in_features
        for depth in range(0, in_features, DEPTH):
            inner = depth + tl.arange(0, DEPTH)
            inner_mask = inner < in_features
            a = tl.load(
                rows_of_x + row_places + inner[None, :], mask=row_mask[:, None] & inner_mask[None, :], other=0.0
            )
            b = tl.load(
                weight + column_places + inner[:, None], mask=column_mask[None, :] & inner_mask[:, None], other=0.0
            )
            total = tl.dot(a, b, total, input_precision="ieee")
        tl.store(
            out + row[:, None].to(tl.int64) * out_features + column[None, :],
            total.to(out.dtype.element_ty),
            mask=row_mask[:, None] & column_mask[None, :],
        )
        row_start += ROWS * TILES
