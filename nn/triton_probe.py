"""The smallest Triton kernel, by which `triton_check` finds out whether Triton can compile at all."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dovetail.nn.triton_launch import FP_FUSION


@triton.jit
def _add_one(out, x, size, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    tl.store(out + places, tl.load(x + places, mask=inside) + 1.0, mask=inside)


def compile_probe(arch: int) -> None:
    """Compiles for compute capability `arch` (80, 90, 100). Raises what Triton raises. No GPU is needed."""
    signature = {"out": "*fp32", "x": "*fp32", "size": "i32", "BLOCK": "constexpr"}
    source = ASTSource(fn=_add_one, signature=signature, constexprs={"BLOCK": 64})
    triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(FP_FUSION))
