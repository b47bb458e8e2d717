"""How the kernels are launched for a large model, as data: for compiling them where there is no GPU."""

from __future__ import annotations

from dovetail.nn.triton_launch import Launch
from dovetail.plugins.quantization.int4.kernels import int4_linear_kernel
from dovetail.plugins.quantization.int4.method import tile_sizes
from dovetail.plugins.quantization.parts import SUM_SIZES
from dovetail.plugins.quantization.parts_kernel import sum_parts_kernel

NUM_ROWS = (16, 32, 64, 128)
_OPTIONS = ("num_warps", "num_stages")


def launches(dtype: str = "bf16", group_size: int = 128) -> list[Launch]:
    """Every height of tiles, with activations of `dtype` ("bf16", "fp16", "fp32"); and the sum of parts."""
    sizes = dict.fromkeys(("in_features", "out_features", "part_size"), "i32:16")
    signature = sizes | {"x": f"*{dtype}", "weights": "*u8", "scales": "*fp16", "zeros": "*fp16", "num_rows": "i32"}
    made = []
    for num_rows in NUM_ROWS if dtype != "fp32" else (16, 64):
        constants = tile_sizes(num_rows, group_size, 4 if dtype == "fp32" else 2)
        options = {name: constants.pop(name) for name in _OPTIONS}
        # Few tokens leave parts of sums.
        out = {"out": "*fp32" if num_rows <= 64 else f"*{dtype}"}
        made.append(Launch(f"int4_linear, {num_rows} rows", int4_linear_kernel, signature | out, constants, options))
    constants = {"BLOCK": SUM_SIZES["BLOCK"]}
    summing = {"out": f"*{dtype}", "parts": "*fp32", "num_parts": "i32", "size": "i32:16"}
    return [*made, Launch("sum_parts", sum_parts_kernel, summing, constants, {"num_warps": SUM_SIZES["num_warps"]})]
