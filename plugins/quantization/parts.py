"""Sums over input features that are cut into parts, of which each program of a Triton kernel computes one: a layer with
few tokens has too few tiles to keep a GPU's memory busy (split-K)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dovetail.nn.triton_launch import FP_FUSION

_PROGRAMS = 528
"""Four for each multiprocessor of an H200, where 132 to 1056 were measured (scripts/tune_linear.py)."""
_MOST_PARTS = 8
_MOST_SUMS = 256
"""Parts times tokens: what is written and read once more has to stay small compared with the weights."""
_LEAST_STEPS = 4
"""Of a part: fewer, and the first loads are waited for most of the time."""
_SUM_BLOCK = 1024
SUM_SIZES: Mapping[str, int] = {"BLOCK": _SUM_BLOCK, "num_warps": 4}


def cut(num_tiles: int, num_rows: int, in_features: int, step: int, unit: int) -> tuple[int, int]:
    """How many parts the sum of each tile is cut into, and how many input features a part has: a multiple of `unit`.

    `step`: input features of one step of the kernel's loop.
    """
    num_parts = max(
        1, min(_MOST_PARTS, _PROGRAMS // num_tiles, _MOST_SUMS // num_rows, in_features // (step * _LEAST_STEPS))
    )
    size = -(-in_features // (num_parts * unit)) * unit
    return -(-in_features // size), size


def add_up(out: torch.Tensor, sums: torch.Tensor) -> None:
    """Writes the sum of float32 [parts, ...] over the parts, in order, into `out`: one launch."""
    from dovetail.plugins.quantization.parts_kernel import sum_parts_kernel

    grid = (-(-out.numel() // _SUM_BLOCK),)
    sum_parts_kernel[grid](out, sums, len(sums), out.numel(), **SUM_SIZES, **FP_FUSION)
