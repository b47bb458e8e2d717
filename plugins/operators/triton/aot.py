"""How the set's kernels are launched for a large model, as data: for compiling them where there is no GPU."""

from __future__ import annotations

from typing import Any

from dovetail.nn.triton_launch import Launch
from dovetail.plugins.operators.triton import accepting, drawing, grouped, low_rank, rows
from dovetail.plugins.operators.triton.operators import chain_sizes, draw_sizes, group_sizes

VOCAB_SIZE = 128256
"""Of Llama 3; a multiple of 16, as sizes and strides of nearly all models are, and Triton compiles for such."""
_SIZES = dict.fromkeys(("row_stride", "head_stride", "angle_stride", "size", "half"), "i32:16") | {
    "num_heads": "i32",
    "eps": "fp32",
}
_DRAWN = {
    "tokens": "*i64",
    "row_stride": "i32:16",
    "temperatures": "*fp32",
    "floors": "*i32",
    "top_ks": "*i64",
    "top_ps": "*fp64",
    "uniforms": "*fp64",
    "vocab_size": "i32:16",
}
_CHAINS = {
    "accepted": "*i64",
    "masses": "*fp64",
    "target": "*fp32",
    "target_stride": "i32:16",
    "draft": "*fp32",
    "draft_stride": "i32:16",
    "token_ids": "*i64",
    "starts": "*i32",
    "accept_uniforms": "*fp64",
    "recover_uniforms": "*fp64",
    "tokens": "*i64",
    "vocab_size": "i32:16",
    "num_parts": "i32:16",
}
_GROUPS = {"starts": "*i32", "in_features": "i32:16", "out_features": "i32:16"}
_ADAPTERS = {
    "inner": "*fp32",
    "part_starts": "*i32",
    "ranks": "*i32",
    "slots": "*i32",
    "num_rows": "i32",
    "num_chunks": "i32",
} | dict.fromkeys(("x_stride", "y_stride", "width", "max_rank", "in_features", "out_features"), "i32:16")


def launches(dtype: str = "bf16") -> list[Launch]:
    """Every kernel with activations of `dtype` ("bf16", "fp16", "fp32"), in the sizes of an 8B model."""
    norm, angles, draws, products, adapters = (
        dict.fromkeys(names, f"*{dtype}") | others
        for names, others in (
            (("out", "x", "residual", "weight", "gate_up"), _SIZES),
            (("heads", "cos", "sin"), _SIZES),
            (("logits",), _DRAWN),
            (("out", "x", "weight"), _GROUPS),
            (("y", "x", "a", "b"), _ADAPTERS),
        )
    )
    element_size = 4 if dtype == "fp32" else 2
    few, many = (group_sizes(num_rows, 8, element_size) for num_rows in (8, 8192))
    masses, tokens = chain_sizes(VOCAB_SIZE)
    wide = {"BLOCK": 4096, "num_warps": 8}
    return [
        _launch("rms_norm", rows.rms_norm_kernel, norm, wide | {"num_heads": 1}),
        _launch("add_rms_norm", rows.add_rms_norm_kernel, norm, wide),
        _launch("silu_mul", rows.silu_mul_kernel, norm, {"BLOCK": 1024}),
        _launch("rotate", rows.rotate_kernel, angles, {"HEADS": 64, "HALF": 64, "num_warps": 8}),
        _launch("draw", drawing.draw_kernel, draws, draw_sizes(VOCAB_SIZE)),
        _launch("accept_chains, masses", accepting.chain_masses_kernel, _CHAINS, masses),
        _launch("accept_chains, tokens", accepting.chain_tokens_kernel, _CHAINS, tokens),
        _launch("grouped_linear, few rows", grouped.grouped_linear_kernel, products, few),
        _launch("grouped_linear, many rows", grouped.grouped_linear_kernel, products, many),
        *(
            launch
            for rank in (16, 64)
            for launch in (
                _launch(
                    f"add_low_rank, inner, rank {rank}",
                    low_rank.low_rank_inner_kernel,
                    adapters,
                    dict(low_rank.inner_sizes(3 * rank, element_size)),
                ),
                _launch(
                    f"add_low_rank, outer, rank {rank}",
                    low_rank.low_rank_outer_kernel,
                    adapters,
                    dict(low_rank.outer_sizes(3, rank)),
                ),
            )
        ),
    ]


def _launch(name: str, kernel: Any, signature: dict[str, str], sizes: dict[str, int]) -> Launch:
    """`sizes`: constants, and num_warps among them."""
    options = {key: value for key, value in sizes.items() if key == "num_warps"}
    constants = {key: value for key, value in sizes.items() if key not in options}
    return Launch(name, kernel, signature, constants, options)
