"""The launches of kernels.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dovetail.nn.triton_launch import FP_FUSION
from dovetail.plugins.quantization.parts import cut
from dovetail.plugins.quantization.w8a8.kernels import few_rows_kernel, quantize_rows_kernel, scale_products_kernel

SCALE_OPTIONS: Mapping[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""Fused, the bias would be added to a product that was not rounded."""
SCALE_BLOCK = 1024
MOST_FEW_ROWS = 64
"""Tokens up to which `few_rows_kernel` is faster than torch's products, which fill tiles of 64 or 128 rows and cut no
sums (H200)."""
_LARGEST_BLOCK = 16384


def quantize_sizes(size: int) -> Mapping[str, Any]:
    """Constants of `quantize_rows_kernel`: a row at once, as far as registers go."""
    block = min(_LARGEST_BLOCK, max(1024, 1 << (size - 1).bit_length()))
    return {"BLOCK": block, "num_warps": max(4, block // 1024), **FP_FUSION}


def tile_sizes(num_rows: int) -> Mapping[str, int]:
    """Constants of `few_rows_kernel`: the lowest tiles that hold all tokens, so that weights are read once."""
    rows = next(rows for rows in (16, 32, 64) if num_rows <= rows)
    return {"ROWS": rows, "COLUMNS": 64, "DEPTH": 128, "num_warps": 4, "num_stages": 4}


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, most: float, least: float, num_rows: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds activations, one scale per token.

    x is [T, size]. Returns values [max(T, num_rows), size] in `dtype` (int8 or float8_e4m3fn), of which the rows behind
    T hold anything, and float32 scales [T].
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    count, size = x.shape
    values = torch.empty(max(count, num_rows), size, dtype=dtype, device=x.device)
    scales = torch.empty(count, dtype=torch.float32, device=x.device)
    if count:
        sizes = x.stride(0), size, most, least
        quantize_rows_kernel[(count,)](values, scales, x, *sizes, **quantize_sizes(size))
    return values, scales


def suits_few(x: torch.Tensor) -> bool:
    """Whether `few_rows_products` takes as many rows as x [T, size] has, and is the faster way."""
    return 0 < len(x) <= MOST_FEW_ROWS


def few_rows_products(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """values [T, in_features], T in 1 .. `MOST_FEW_ROWS`, times weights [out_features, in_features], both
    int8 or float8_e4m3fn: int32 or float32 [parts, T, out_features], to be added up."""
    (num_rows, in_features), out_features = values.shape, len(weights)
    sizes = tile_sizes(num_rows)
    step = sizes["DEPTH"]
    num_tiles = -(-out_features // sizes["COLUMNS"])
    num_parts, part_size = cut(num_tiles, num_rows, in_features, step, step)
    dtype = torch.int32 if values.dtype == torch.int8 else torch.float32
    products = torch.empty(num_parts, num_rows, out_features, dtype=dtype, device=values.device)
    features = num_rows, in_features, out_features, part_size
    few_rows_kernel[(num_tiles, 1, num_parts)](products, values, weights, *features, **sizes, **FP_FUSION)
    return products


def scale_products(
    products: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """int32 or float32 [parts, >= T, size] -> [T, size] in `dtype`: the sum over the parts, times float32 [T] and
    [size], plus a bias [size] of `dtype`."""
    count, (num_parts, num_rows, size) = len(row_scales), products.shape
    out = torch.empty(count, size, dtype=dtype, device=products.device)
    if count:
        grid = (count, -(-size // SCALE_BLOCK))
        added = column_scales if bias is None else bias
        parts = num_parts, num_rows * size, size
        scale_products_kernel[grid](
            out, products, row_scales, column_scales, added, *parts, bias is not None, SCALE_BLOCK, **SCALE_OPTIONS
        )
    return out
