"""Triton kernels of eight-bit products: activations are rounded before, and results scaled behind, in one launch each,
with the bits of the same steps in torch; and the product itself, for few tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantize_rows_kernel(values, scales, x, row_stride, size, most, least, BLOCK: tl.constexpr):
    """One row per program: x divided by its scale, which is the row's largest magnitude, `least` at the least, over
    `most`. values is contiguous, int8 or float8_e4m3fn; int8 is rounded to nearest, halves to even.

    A row that holds NaN or an infinity gets a scale of NaN or infinity, so that nothing finite comes of it.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * row_stride
    values += row * size
    # As integers, the bits of magnitudes have the order of the numbers, and NaN, which a maximum of floats drops, is
    # above all.
    lanes = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        wide = tl.load(x + columns, mask=columns < size, other=0.0).to(tl.float32)
        lanes = tl.maximum(lanes, tl.abs(wide).to(tl.int32, bitcast=True))
    largest = tl.max(lanes, axis=0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.where(largest < least, least, largest), most)
    tl.store(scales + row, scale)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        wide = tl.load(x + columns, mask=columns < size, other=0.0).to(tl.float32)
        ratio = tl.div_rn(wide, scale)
        if values.dtype.element_ty == tl.int8:
            # Adding 1.5 * 2**23 leaves no bits for a fraction.
            ratio = (ratio + 12582912.0) - 12582912.0
        tl.store(values + columns, ratio.to(values.dtype.element_ty), mask=columns < size)


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    products,
    values,
    weights,
    num_rows,
    in_features,
    out_features,
    part_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Part program_id(2) of the sum over input features, for one tile of `products` ([parts, rows, out_features], int32
    or float32); everything contiguous. Tiles are turned: the many weights, not the few rows, fill the matrix units.

    Hopper's units add float8 products in 14 bits behind the point; every 128 are added up in float32 (DeepSeek-V3,
    section 3.3.2).
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, DEPTH)
    row_mask, column_mask = row < num_rows, column < out_features
    value_places = values + row[:, None].to(tl.int64) * in_features + inner[None, :]
    weight_places = weights + column[:, None].to(tl.int64) * in_features + inner[None, :]
    first = tl.program_id(2) * part_size
    dtype: tl.constexpr = products.dtype.element_ty
    total = tl.zeros([COLUMNS, ROWS], dtype=dtype)
    for start in range(first, tl.minimum(first + part_size, in_features), DEPTH):
        inside = (start + inner < in_features)[None, :]
        weight = tl.load(weight_places + start, mask=column_mask[:, None] & inside, other=0.0)
        value = tl.load(value_places + start, mask=row_mask[:, None] & inside, other=0.0)
        total = tl.dot(weight, value.T, total, max_num_imprecise_acc=128, out_dtype=dtype)
    products += tl.program_id(2).to(tl.int64) * num_rows * out_features
    places = row[:, None].to(tl.int64) * out_features + column[None, :]
    tl.store(products + places, total.T, mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["num_parts"])
def scale_products_kernel(
    out,
    products,
    row_scales,
    column_scales,
    bias,
    num_parts,
    part_stride,
    size,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part of one row per program: sums, int32 or float32, in `num_parts` parts, times both scales, rounded to the
    dtype of `out`, then the bias. All contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    dtype = out.dtype.element_ty
    products += row * size + columns
    total = tl.load(products, mask=inside, other=0)
    for _ in range(1, num_parts):
        products += part_stride
        total += tl.load(products, mask=inside, other=0)
    wide = total.to(tl.float32)
    scaled = wide * tl.load(row_scales + row) * tl.load(column_scales + columns, mask=inside, other=0.0)
    y = scaled.to(dtype)
    if HAS_BIAS:
        y = (y.to(tl.float32) + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)).to(dtype)
    tl.store(out + row * size + columns, y, mask=inside)
