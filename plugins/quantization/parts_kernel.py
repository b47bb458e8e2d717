"""The Triton kernel that adds up the parts of a sum (parts.py)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_parts"])
def sum_parts_kernel(out, parts, num_parts, size, BLOCK: tl.constexpr):
    """float32 [num_parts, size] -> [size], added in order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    parts += place
    for _ in range(num_parts):
        total += tl.load(parts, mask=inside, other=0.0)
        parts += size
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
