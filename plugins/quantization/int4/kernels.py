"""A Triton kernel that multiplies by four-bit weights without writing them out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def int4_linear_kernel(
    out,
    x,
    weights,
    scales,
    zeros,
    num_rows,
    in_features,
    out_features,
    group_size,
    part_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Part program_id(2) of the sum over input features, for one tile of `out` (float32 [parts, rows, out_features]).

    weights is uint8 [out_features, in_features / 2]: neighbours in low and high nibble, so x is read at even and at odd
    places. Each step takes 2 PAIRS input features of one group.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    pair = tl.arange(0, PAIRS)
    row_mask = row < num_rows
    column_mask = column < out_features
    num_groups = in_features // group_size
    first = tl.program_id(2) * part_size
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(first, tl.minimum(first + part_size, in_features), 2 * PAIRS):
        group = start // group_size
        even = x + row[:, None].to(tl.int64) * in_features + start + 2 * pair[None, :]
        low_x = tl.load(even, mask=row_mask[:, None], other=0.0)
        high_x = tl.load(even + 1, mask=row_mask[:, None], other=0.0)
        place = column[None, :].to(tl.int64) * (in_features // 2) + start // 2 + pair[:, None]
        packed = tl.load(weights + place, mask=column_mask[None, :], other=0)
        side = column.to(tl.int64) * num_groups + group
        scale = tl.load(scales + side, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        zero = tl.load(zeros + side, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        low = (((packed & 15).to(tl.float32) - zero) * scale).to(x.dtype.element_ty)
        high = (((packed >> 4).to(tl.float32) - zero) * scale).to(x.dtype.element_ty)
        total = tl.dot(low_x, low, total, input_precision="ieee")
        total = tl.dot(high_x, high, total, input_precision="ieee")
    out += tl.program_id(2).to(tl.int64) * num_rows * out_features
    place = row[:, None].to(tl.int64) * out_features + column[None, :]
    tl.store(out + place, total, mask=row_mask[:, None] & column_mask[None, :])
