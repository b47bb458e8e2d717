"""Triton kernels around the products of eight-bit numbers: activations are rounded before, and results scaled behind,
in one launch each. Their results have the bits of the same steps in torch."""

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


@triton.jit
def scale_products_kernel(
    out, products, row_scales, column_scales, bias, size, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """A part of one row per program: int32 sums times both scales, rounded to the dtype of `out`, then the bias. All
    contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    dtype = out.dtype.element_ty
    wide = tl.load(products + row * size + columns, mask=inside, other=0).to(tl.float32)
    scaled = wide * tl.load(row_scales + row) * tl.load(column_scales + columns, mask=inside, other=0.0)
    y = scaled.to(dtype)
    if HAS_BIAS:
        y = (y.to(tl.float32) + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)).to(dtype)
    tl.store(out + row * size + columns, y, mask=inside)
