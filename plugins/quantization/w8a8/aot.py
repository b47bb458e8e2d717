"""How the kernels are launched for a large model, as data: for compiling them where there is no GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.nn.triton_launch import Launch
from dovetail.plugins.quantization.w8a8.fused import SCALE_BLOCK, SCALE_OPTIONS, quantize_sizes, tile_sizes
from dovetail.plugins.quantization.w8a8.kernels import few_rows_kernel, quantize_rows_kernel, scale_products_kernel

_TYPES = {"int8": "*i8", "fp8": "*fp8e4nv"}
_SUMS = {"int8": "*i32", "fp8": "*fp32"}


_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


def launches(dtype: str = "bf16") -> list[Launch]:
    """Rounding to each dtype of weights, products of few tokens in both, and the scaling of int8's, with activations
    of `dtype` ("bf16", "fp16", "fp32"). float8_e4m3fn compiles for sm_89 and later."""
    rounding = {"scales": "*fp32", "x": f"*{dtype}", "row_stride": "i32:16", "size": "i32:16"}
    rounding |= dict.fromkeys(("most", "least"), "fp32")
    constants, options = _split(quantize_sizes(4096))
    quantize = [
        Launch(f"quantize_rows, {kind}", quantize_rows_kernel, rounding | {"values": values}, constants, options)
        for kind, values in _TYPES.items()
    ]
    scaling = {"products": "*i32", "num_parts": "i32", "part_stride": "i32:16", "size": "i32:16"}
    scaling |= dict.fromkeys(("row_scales", "column_scales"), "*fp32") | dict.fromkeys(("out", "bias"), f"*{dtype}")
    scale = Launch(
        "scale_products", scale_products_kernel, scaling, {"HAS_BIAS": True, "BLOCK": SCALE_BLOCK}, SCALE_OPTIONS
    )
    return [*quantize, *_products(), scale]


def _products() -> list[Launch]:
    features = dict.fromkeys(("in_features", "out_features", "part_size"), "i32:16") | {"num_rows": "i32"}
    made = []
    for kind, values in _TYPES.items():
        signature = features | {"products": _SUMS[kind]} | dict.fromkeys(("values", "weights"), values)
        for num_rows in (16, 32, 64):
            constants, options = _split(tile_sizes(num_rows))
            made.append(Launch(f"few_rows, {kind}, {num_rows} rows", few_rows_kernel, signature, constants, options))
    return made


def _split(sizes: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants and options."""
    constants = {name: value for name, value in sizes.items() if name not in _OPTIONS}
    return constants, {name: value for name, value in sizes.items() if name in _OPTIONS}
