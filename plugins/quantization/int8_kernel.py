"""A Triton kernel that multiplies by int8 weights without writing them out, for GPUs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from dovetail.nn.triton_launch import FP_FUSION, Launch
from dovetail.plugins.quantization.parts import add_up, cut


@triton.jit(do_not_specialize=["num_rows"])
def int8_linear_kernel(
    out,
    x,
    weights,
    scales,
    num_rows,
    in_features,
    out_features,
    part_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Part program_id(2) of the sum over input features, for one tile of `out` ([parts, rows, out_features]);
    everything contiguous. It is computed turned: weights, widened in registers, are the left factor, which needs not be
    in shared memory. The scale of an output feature is applied to its sum. One kernel for any number of rows: a prompt
    of another length must not compile while it is served."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, DEPTH)
    row_mask, column_mask = row < num_rows, column < out_features
    x_places = x + row[:, None].to(tl.int64) * in_features + inner[None, :]
    weight_places = weights + column[:, None].to(tl.int64) * in_features + inner[None, :]
    first = tl.program_id(2) * part_size
    total = tl.zeros([COLUMNS, ROWS], dtype=tl.float32)
    for start in range(first, tl.minimum(first + part_size, in_features), DEPTH):
        inside = (start + inner < in_features)[None, :]
        weight = tl.load(weight_places + start, mask=column_mask[:, None] & inside, other=0)
        own = tl.load(x_places + start, mask=row_mask[:, None] & inside, other=0.0)
        total = tl.dot(weight.to(x.dtype.element_ty), own.T, total, input_precision="ieee")
    scaled = total * tl.load(scales + column, mask=column_mask, other=0.0)[:, None]
    out += tl.program_id(2).to(tl.int64) * num_rows * out_features
    places = row[:, None].to(tl.int64) * out_features + column[None, :]
    tl.store(out + places, scaled.T.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


def multiplied(x: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x [T, in_features] times int8 [out_features, in_features] and float32 [out_features]: [T, out_features] in x's
    dtype, off from the exact product by one rounding and the order of a float32 sum. One launch, two where sums are
    cut into parts."""
    x = x.contiguous()
    (num_rows, in_features), out_features = x.shape, len(weights)
    out = x.new_empty(num_rows, out_features)
    if num_rows:
        sizes = tile_sizes(num_rows, x.element_size())
        num_tiles = -(-out_features // sizes["COLUMNS"]), -(-num_rows // sizes["ROWS"])
        step = sizes["DEPTH"]
        num_parts, part_size = cut(num_tiles[0] * num_tiles[1], num_rows, in_features, step, step)
        sums = out if num_parts == 1 else x.new_empty(num_parts, *out.shape, dtype=torch.float32)
        features = num_rows, in_features, out_features, part_size
        int8_linear_kernel[(*num_tiles, num_parts)](sums, x, weights, scales, *features, **sizes, **FP_FUSION)
        if num_parts > 1:
            add_up(out, sums)
    return out


def tile_sizes(num_rows: int, element_size: int) -> Mapping[str, int]:
    """Constants of the kernel: few tokens leave the tiles small, so that there are enough of them."""
    if element_size == 4:  # without matrix units
        return {"ROWS": 16 if num_rows <= 16 else 64, "COLUMNS": 64, "DEPTH": 64, "num_warps": 8, "num_stages": 2}
    if num_rows <= 32:
        rows = 16 if num_rows <= 16 else 32
        return {"ROWS": rows, "COLUMNS": 32, "DEPTH": 256, "num_warps": 4, "num_stages": 3}
    rows, depth = (64, 128) if num_rows <= 64 else (128, 64)
    return {"ROWS": rows, "COLUMNS": 128, "DEPTH": depth, "num_warps": 8, "num_stages": 3}


def launches(dtype: str = "bf16") -> list[Launch]:
    """Every height of tiles for a large model, with activations of `dtype` ("bf16", "fp16", "fp32"): for compiling
    them where there is no GPU."""
    signature = dict.fromkeys(("in_features", "out_features", "part_size"), "i32:16") | {"num_rows": "i32"}
    signature |= {"x": f"*{dtype}", "weights": "*i8", "scales": "*fp32"}
    made = []
    for num_rows in (16, 64) if dtype == "fp32" else (16, 32, 64, 128):
        constants = dict(tile_sizes(num_rows, 4 if dtype == "fp32" else 2))
        options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
        # Few tokens leave parts of sums.
        out = {"out": "*fp32" if num_rows <= 64 else f"*{dtype}"}
        made.append(Launch(f"int8_linear, {num_rows} rows", int8_linear_kernel, signature | out, constants, options))
    return made
