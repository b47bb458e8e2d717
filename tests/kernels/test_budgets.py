"""The inner loops of the Triton kernels within their budgets: more instructions there are a slower kernel, as no test
of results shows."""

from __future__ import annotations

import json
import runpy
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl

from dovetail.testing.kernel_loops import innermost_loops
from dovetail.testing.triton_aot import compile_kernel

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "kernel_loops.py"))
LAUNCHES = {launch.name: launch for launch in TOOL["launches"]()}
CHEAP = "draw"
BUDGETS: dict[str, Any] = json.loads(TOOL["BUDGETS"].read_text())


@pytest.mark.parametrize(
    "name", [name if name == CHEAP else pytest.param(name, marks=pytest.mark.kernels) for name in LAUNCHES]
)
def test_inner_loops_are_within_their_budgets(name: str) -> None:
    about = BUDGETS["about"]
    assert metadata.version("triton") == about["triton"], "another Triton: python scripts/kernel_loops.py --write"
    allowed = BUDGETS["kernels"][name]
    margins = {"instructions": about["margin"]}
    for what, count in TOOL["costs"](LAUNCHES[name]).items():
        assert count <= allowed[what] * margins.get(what, 1.0), f"{name}: {what}"


@triton.jit
def total(out, x, size, INSIDE: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.zeros([BLOCK], dtype=tl.float32)
    number = 0.0
    for start in range(0, size, BLOCK):
        part = tl.load(x + start + tl.arange(0, BLOCK))
        if INSIDE:
            number += tl.sum(part, axis=0)
        else:
            lanes += part
    tl.store(out, number if INSIDE else tl.sum(lanes, axis=0))


def test_a_sum_that_is_moved_into_a_loop_is_seen() -> None:
    """Its threads exchange numbers, and its warps wait for each other, in every turn."""
    signature = {"out": "*fp32", "x": "*fp32", "size": "i32:16"}
    inside, outside = (
        innermost_loops(compile_kernel(total, signature, {"INSIDE": place, "BLOCK": 512}, 90).cubin)
        for place in (True, False)
    )
    assert max(loop.counts["SHFL"] for loop in inside) > 0
    assert max(loop.counts["BAR"] for loop in inside) > 0
    assert all(loop.counts["SHFL"] == loop.counts["BAR"] == 0 for loop in outside)
    assert len(outside) > 0
