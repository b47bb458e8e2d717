"""The launches of kernels.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dovetail.nn.triton_launch import FP_FUSION
from dovetail.plugins.quantization.w8a8.kernels import quantize_rows_kernel, scale_products_kernel

QUANTIZE_OPTIONS: Mapping[str, Any] = {"num_warps": 8, **FP_FUSION}
SCALE_OPTIONS: Mapping[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""Fused, the bias would be added to a product that was not rounded."""
QUANTIZE_BLOCK = 4096
SCALE_BLOCK = 1024


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
        quantize_rows_kernel[(count,)](values, scales, x, *sizes, BLOCK=QUANTIZE_BLOCK, **QUANTIZE_OPTIONS)
    return values, scales


def scale_products(
    products: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """int32 [>= T, size] -> [T, size] in `dtype`: times float32 [T] and [size], plus a bias [size] of `dtype`."""
    count, size = len(row_scales), products.shape[1]
    out = torch.empty(count, size, dtype=dtype, device=products.device)
    if count:
        grid = (count, -(-size // SCALE_BLOCK))
        added = column_scales if bias is None else bias
        scale_products_kernel[grid](
            out, products, row_scales, column_scales, added, size, bias is not None, SCALE_BLOCK, **SCALE_OPTIONS
        )
    return out
