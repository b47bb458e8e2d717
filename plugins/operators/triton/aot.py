"""How the set's kernels are launched for a large model, as data: for compiling them where there is no GPU."""

from __future__ import annotations

from dovetail.nn.triton_launch import Launch
from dovetail.plugins.operators.triton import accepting, drawing, grouped, rows


def launches(dtype: str = "bf16") -> list[Launch]:
    """Every kernel with activations of `dtype` ("bf16", "fp16", "fp32"), in the sizes of an 8B model."""
    x = f"*{dtype}"
    sizes = {"row_stride": "i32", "head_stride": "i32", "num_heads": "i32", "size": "i32", "eps": "fp32"}
    norm = {"out": x, "x": x, "residual": x, "weight": x, "gate_up": x} | sizes
    angles = {"heads": x, "cos": x, "sin": x, "angle_stride": "i32", "half": "i32"} | sizes
    draws = {
        "tokens": "*i64",
        "logits": x,
        "row_stride": "i32",
        "temperatures": "*fp32",
        "floors": "*i32",
        "top_ks": "*i64",
        "top_ps": "*fp64",
        "uniforms": "*fp64",
        "vocab_size": "i32",
    }
    chains = {
        "accepted": "*i64",
        "masses": "*fp64",
        "target": "*fp32",
        "target_stride": "i32",
        "draft": "*fp32",
        "draft_stride": "i32",
        "token_ids": "*i64",
        "starts": "*i32",
        "accept_uniforms": "*fp64",
        "recover_uniforms": "*fp64",
        "tokens": "*i64",
        "vocab_size": "i32",
        "num_parts": "i32",
    }
    parts = {"BLOCK": 4096, "PARTS": 32}
    products = {"out": x, "x": x, "weight": x, "starts": "*i32", "in_features": "i32", "out_features": "i32"}
    few, many = (
        {"ROWS": height, "COLUMNS": 64, "DEPTH": 32 if dtype == "fp32" else 64, "TILES": 4} for height in (16, 64)
    )
    return [
        Launch("rms_norm", rows.rms_norm_kernel, norm, {"BLOCK": 4096}, {"num_warps": 8}),
        Launch("add_rms_norm", rows.add_rms_norm_kernel, norm, {"BLOCK": 4096}, {"num_warps": 8}),
        Launch("silu_mul", rows.silu_mul_kernel, norm, {"BLOCK": 1024}),
        Launch("rotate", rows.rotate_kernel, angles, {"HEADS": 64, "HALF": 64}, {"num_warps": 8}),
        Launch("draw", drawing.draw_kernel, draws, {"BLOCK": 1024, "WAYS": 16}, {"num_warps": 8}),
        Launch("accept_chains, masses", accepting.chain_masses_kernel, chains, {"BLOCK": 4096}, {"num_warps": 8}),
        Launch("accept_chains, tokens", accepting.chain_tokens_kernel, chains, parts, {"num_warps": 8}),
        Launch("grouped_linear, few rows", grouped.grouped_linear_kernel, products, few),
        Launch("grouped_linear, many rows", grouped.grouped_linear_kernel, products, many, {"num_warps": 8}),
    ]
