"""Triton kernels that multiply by four-bit weights without writing them out."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _whole_numbers(nibbles, zero, dtype: tl.constexpr):
    """nibbles - zero, exactly, in dtype. The bits of a nibble, put into those of a power of two whose last bit is worth
    1, are a float: a conversion would be eight times slower."""
    if dtype == tl.bfloat16:
        return (nibbles.to(tl.int16) | 0x4300).to(dtype, bitcast=True) - (zero.to(tl.float32) + 128.0).to(dtype)
    elif dtype == tl.float16:
        return (nibbles.to(tl.int16) | 0x6400).to(dtype, bitcast=True) - (zero.to(tl.float32) + 1024.0).to(dtype)
    else:
        return (nibbles.to(tl.int32) | 0x4B000000).to(dtype, bitcast=True) - (zero.to(tl.float32) + 8388608.0)


@triton.jit(do_not_specialize=["num_rows"])
def int4_linear_kernel(
    out,
    x,
    weights,
    scales,
    zeros,
    num_rows,
    in_features,
    out_features,
    part_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Part program_id(2) of the sum over input features, for one tile of `out` ([parts, rows, out_features]).

    weights is uint8 [out_features, in_features / 2], as `in_halves` arranges them: of 32 neighbours, which 16 bytes
    hold, the first 16 are in the low nibbles and the others in the high ones, so both are multiplied by neighbours of
    x. scales and zeros are float16 [in_features / GROUP, out_features]; zeros are whole numbers. Each step takes DEPTH
    input features of one group. Tiles are turned: weights, widened in registers, are the left factor, which needs not
    be in shared memory. Scales are applied to sums. One kernel for any number of rows: a prompt of another length must
    not compile while it is served.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_mask = row < num_rows
    column_mask = column < out_features
    byte = tl.arange(0, DEPTH // 2)
    neighbour = byte // 16 * 32 + byte % 16
    x_places = x + row[:, None].to(tl.int64) * in_features + neighbour[None, :]
    weight_places = weights + column[:, None].to(tl.int64) * (in_features // 2) + byte[None, :]
    first = tl.program_id(2) * part_size
    # Triton has under way what will be multiplied, but not what is applied to sums. So few rows, whose steps are
    # short, load scales a step ahead. With many rows that costs more exchanges than it saves (H200).
    AHEAD: tl.constexpr = ROWS <= 32
    side = first // GROUP * out_features + column
    scale = tl.load(scales + side, mask=column_mask, other=0.0)
    zero = tl.load(zeros + side, mask=column_mask, other=0.0)
    total = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for start in range(first, tl.minimum(first + part_size, in_features), DEPTH):
        packed = tl.load(weight_places + start // 2, mask=column_mask[:, None], other=0)
        low_x = tl.load(x_places + start, mask=row_mask[:, None], other=0.0)
        high_x = tl.load(x_places + start + 16, mask=row_mask[:, None], other=0.0)
        next_scale, next_zero = scale, zero
        if AHEAD:
            side = tl.minimum(start + DEPTH, in_features - 1) // GROUP * out_features + column
            next_scale = tl.load(scales + side, mask=column_mask, other=0.0)
            next_zero = tl.load(zeros + side, mask=column_mask, other=0.0)
        else:
            side = start // GROUP * out_features + column
            scale = tl.load(scales + side, mask=column_mask, other=0.0)
            zero = tl.load(zeros + side, mask=column_mask, other=0.0)
        offset = zero[:, None]
        sums = tl.dot(_whole_numbers(packed & 15, offset, x.dtype.element_ty), low_x.T, input_precision="ieee")
        sums = tl.dot(_whole_numbers(packed >> 4, offset, x.dtype.element_ty), high_x.T, sums, input_precision="ieee")
        total += sums * scale.to(tl.float32)[:, None]
        scale, zero = next_scale, next_zero
    out += tl.program_id(2).to(tl.int64) * num_rows * out_features
    places = row[:, None].to(tl.int64) * out_features + column[None, :]
    tl.store(out + places, total.T.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
