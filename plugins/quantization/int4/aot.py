"""How the kernel is launched for a large model, as data: for compiling it where there is no GPU."""

from __future__ import annotations

from dovetail.nn.triton_launch import Launch
from dovetail.plugins.quantization.int4.kernels import int4_linear_kernel
from dovetail.plugins.quantization.int4.method import COLUMNS, PAIRS, TILE_ROWS


def launches(dtype: str = "bf16") -> list[Launch]:
    """Every height of tiles, with activations of `dtype` ("bf16", "fp16", "fp32")."""
    signature = {
        "out": "*fp32",
        "x": f"*{dtype}",
        "weights": "*u8",
        "scales": "*fp16",
        "zeros": "*fp16",
        "num_rows": "i32",
        "in_features": "i32:16",
        "out_features": "i32:16",
        "group_size": "i32:16",
        "part_size": "i32:16",
    }
    return [
        Launch(
            f"int4_linear, {rows} rows",
            int4_linear_kernel,
            signature,
            {"ROWS": rows, "COLUMNS": COLUMNS, "PAIRS": PAIRS},
        )
        for rows in TILE_ROWS
    ]
