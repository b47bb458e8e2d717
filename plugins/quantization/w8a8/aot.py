"""How the kernels are launched for a large model, as data: for compiling them where there is no GPU."""

from __future__ import annotations

from dovetail.nn.triton_launch import Launch
from dovetail.plugins.quantization.w8a8.fused import QUANTIZE_BLOCK, QUANTIZE_OPTIONS, SCALE_BLOCK, SCALE_OPTIONS
from dovetail.plugins.quantization.w8a8.kernels import quantize_rows_kernel, scale_products_kernel

_TYPES = {"int8": "*i8", "fp8": "*fp8e4nv"}


def launches(dtype: str = "bf16") -> list[Launch]:
    """Rounding to each dtype of weights, and the scaling of int8's products, with activations of `dtype` ("bf16",
    "fp16", "fp32"). float8_e4m3fn compiles for sm_89 and later."""
    rounding = {"scales": "*fp32", "x": f"*{dtype}", "row_stride": "i32:16", "size": "i32:16"}
    rounding |= dict.fromkeys(("most", "least"), "fp32")
    quantize = [
        Launch(
            f"quantize_rows, {kind}",
            quantize_rows_kernel,
            rounding | {"values": values},
            {"BLOCK": QUANTIZE_BLOCK},
            QUANTIZE_OPTIONS,
        )
        for kind, values in _TYPES.items()
    ]
    scaling = {"products": "*i32", "size": "i32:16"} | dict.fromkeys(("row_scales", "column_scales"), "*fp32")
    scaling |= dict.fromkeys(("out", "bias"), f"*{dtype}")
    scale = Launch(
        "scale_products", scale_products_kernel, scaling, {"HAS_BIAS": True, "BLOCK": SCALE_BLOCK}, SCALE_OPTIONS
    )
    return [*quantize, scale]
