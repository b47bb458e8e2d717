"""The `triton` operator set: each operator as one kernel, for GPUs."""

from __future__ import annotations

import os
import sys
from typing import Any, ClassVar

import torch

from dovetail.contracts.operators import (
    AcceptsChains,
    AddsNarrowLowRank,
    DrawsTokens,
    MultipliesGroups,
    OperatorsCapabilities,
    OperatorsNeed,
)
from dovetail.contracts.plugin import Environment
from dovetail.nn.triton_check import reasons_against_triton
from dovetail.nn.triton_launch import FP_FUSION

_DTYPES = ("float32", "float16", "bfloat16")
_LONGEST_ROW = 65536
_SILU_BLOCK = 1024
_DRAW_BLOCK = 4096
_DRAW_WAYS = 8
_CHAIN_BLOCK = 4096
_TILES = 4
"""Row tiles of one expert that are computed side by side."""


class TritonOperators(DrawsTokens, MultipliesGroups, AcceptsChains, AddsNarrowLowRank):
    """Norms, activations, rotations, drawing of tokens and products of experts, one launch each; acceptance of drafts
    and low-rank adapters in two."""

    contract: ClassVar[tuple[int, int]] = (1, 3)
    stability = "experimental"
    preference: ClassVar[int] = 5
    capabilities = OperatorsCapabilities(
        device_types=frozenset({"cpu", "cuda"}), dtypes=frozenset(_DTYPES), graph_capture=True
    )

    @classmethod
    def check(cls, need: OperatorsNeed, options: Any, environment: Environment) -> list[str]:
        """A GPU, or Triton's interpreter, which runs kernels on the CPU for tests."""
        if need.device_type != "cuda" and "triton" not in sys.modules and "TRITON_INTERPRET" not in os.environ:
            # Nothing but its interpreter could serve, and its import takes 80 MB that stay.
            return [f"triton operators run on cuda, not on {need.device_type}"]
        if need.device_type == "cuda":
            return reasons_against_triton(environment)
        try:
            from triton import knobs
        except ImportError as error:
            return [f"Triton cannot be imported ({error}): pip install triton"]
        return [] if knobs.runtime.interpret else [f"triton operators run on cuda, not on {need.device_type}"]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        from dovetail.plugins.operators.triton.rows import rms_norm_kernel

        size = _size(x, weight)
        out = x.new_empty(x.shape)
        if x.stride(-1) != 1:
            x = x.contiguous()
        heads = x.shape[1] if x.dim() == 3 else 1
        if out.numel():
            strides = x.stride(0), x.stride(1) if x.dim() == 3 else 0
            grid = (x.shape[0] * heads,)
            rms_norm_kernel[grid](out, x, weight, *strides, heads, size, eps, **_blocks(size), **FP_FUSION)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In the memory of x and residual."""
        from dovetail.plugins.operators.triton.rows import add_rms_norm_kernel

        size = _size(x, weight)
        if residual.shape != x.shape or residual.dtype != x.dtype:
            raise ValueError(f"a residual {list(residual.shape)} {residual.dtype} for {list(x.shape)} {x.dtype}")
        x, residual = x.contiguous(), residual.contiguous()
        if x.numel():
            add_rms_norm_kernel[(x.shape[0],)](x, residual, weight, size, eps, **_blocks(size), **FP_FUSION)
        return x, residual

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        from dovetail.plugins.operators.triton.rows import silu_mul_kernel

        if gate_up.stride(-1) != 1:
            gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        if out.numel():
            grid = (rows, -(-size // _SILU_BLOCK))
            silu_mul_kernel[grid](out, gate_up, gate_up.stride(0), size, BLOCK=_SILU_BLOCK, **FP_FUSION)
        return out

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates in place, where the elements of a head are contiguous."""
        from dovetail.plugins.operators.triton.rows import rotate_kernel

        if cos.shape[0] != heads.shape[0] or cos.shape[2] > heads.shape[2]:
            raise ValueError(f"angles {list(cos.shape)} for heads {list(heads.shape)}")
        if heads.stride(2) != 1:
            heads = heads.clone(memory_format=torch.contiguous_format)
        if cos.stride(2) != 1 or sin.stride() != cos.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        tokens, num_heads, _ = heads.shape
        half = cos.shape[2] // 2
        if heads.numel():
            sizes = {"HEADS": _power_of_2(num_heads), "HALF": _power_of_2(half)}
            sizes["num_warps"] = warps(sizes["HEADS"] * sizes["HALF"])
            strides = heads.stride(0), heads.stride(1), cos.stride(0)
            rotate_kernel[(tokens,)](heads, cos, sin, *strides, num_heads, half, **sizes, **FP_FUSION)
        return heads

    def draw(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        min_p: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor:
        from dovetail.plugins.operators.triton.drawing import draw_kernel

        rows, vocab_size = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        floors = min_p.log().neg_().abs_().view(torch.int32)
        if rows:
            columns = temperature, floors, top_k, top_p, uniforms
            stride = logits.stride(0)
            draw_kernel[(rows,)](tokens, logits, stride, *columns, vocab_size, **draw_sizes(vocab_size), **FP_FUSION)
        return tokens

    def grouped_linear(self, x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        from dovetail.plugins.operators.triton.grouped import grouped_linear_kernel

        groups, out_features, in_features = weight.shape
        x = x.contiguous()
        out = x.new_empty(x.shape[0], out_features)
        if x.shape[0]:
            sizes = group_sizes(x.shape[0], groups, x.element_size())
            grid = (groups, -(-out_features // sizes["COLUMNS"]), _TILES)
            grouped_linear_kernel[grid](out, x, weight, starts, in_features, out_features, **sizes, **FP_FUSION)
        return out

    def accept_chains(
        self,
        target: torch.Tensor,
        draft: torch.Tensor,
        token_ids: torch.Tensor,
        starts: torch.Tensor,
        accept_uniforms: torch.Tensor,
        recover_uniforms: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from dovetail.plugins.operators.triton.accepting import chain_masses_kernel, chain_tokens_kernel

        chains, vocab_size, device = len(starts) - 1, target.shape[1], target.device
        if draft.shape[1] != vocab_size or len(target) != len(draft) + chains:
            raise ValueError(f"drafts {list(draft.shape)} for targets {list(target.shape)} of {chains} chains")
        target, draft = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (target, draft))
        accepted, tokens = torch.empty(2, chains, dtype=torch.int64, device=device)
        first, second = chain_sizes(vocab_size)
        parts = -(-vocab_size // first["BLOCK"])
        masses = torch.empty(chains, parts, 2, dtype=torch.float64, device=device)
        rows = target, target.stride(0), draft, draft.stride(0)
        if chains:
            grid, given = (chains, parts), (token_ids, starts, accept_uniforms, vocab_size)
            chain_masses_kernel[grid](accepted, masses, *rows, *given, **first, **FP_FUSION)
            columns = starts, recover_uniforms, vocab_size, parts
            chain_tokens_kernel[(chains,)](tokens, accepted, masses, *rows, *columns, **second, **FP_FUSION)
        return accepted, tokens

    def add_low_rank(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        part_starts: torch.Tensor,
        ranks: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        from dovetail.plugins.operators.triton import low_rank

        low_rank.add(y, x, a, b, part_starts, ranks, slots)


def _size(x: torch.Tensor, weight: torch.Tensor) -> int:
    size = weight.shape[0]
    if x.shape[-1] != size:
        raise ValueError(f"a norm of {size} elements for rows of {x.shape[-1]}")
    if size > _LONGEST_ROW:
        raise ValueError(f"a norm of {size} elements: triton operators serve rows of up to {_LONGEST_ROW}")
    return size


def _blocks(size: int) -> dict[str, int]:
    block = _power_of_2(size)
    return {"BLOCK": block, "num_warps": warps(block)}


def draw_sizes(vocab_size: int) -> dict[str, int]:
    """Constants of `draw_kernel`."""
    block = min(_DRAW_BLOCK, _power_of_2(vocab_size))
    blocks = _power_of_2(-(-vocab_size // block))
    return {"BLOCK": block, "BLOCKS": blocks, "WAYS": _DRAW_WAYS, "num_warps": 2 * warps(block)}


def group_sizes(num_rows: int, groups: int, element_size: int) -> dict[str, int]:
    """Constants of `grouped_linear_kernel`: decode steps give an expert few rows each, prompts many."""
    rows = 16 if num_rows <= 16 * groups else 64
    depth = 64 if element_size == 2 else 32
    return {"ROWS": rows, "COLUMNS": 64, "DEPTH": depth, "TILES": _TILES, "num_warps": 4 if rows == 16 else 8}


def chain_sizes(vocab_size: int) -> tuple[dict[str, int], dict[str, int]]:
    """Constants of `chain_masses_kernel` and `chain_tokens_kernel`."""
    block = min(_CHAIN_BLOCK, _power_of_2(vocab_size))
    sizes = {"BLOCK": block, "num_warps": warps(block)}
    return sizes, sizes | {"PARTS": _power_of_2(-(-vocab_size // block))}


def warps(elements: int) -> int:
    """Threads in 32s, so that each holds 16 of a program's elements."""
    return min(16, max(1, elements // 512))


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
