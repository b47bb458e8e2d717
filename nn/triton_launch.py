"""How a Triton kernel is launched, as data, so that what a plugin brings can be compiled where there is no GPU
(`dovetail.testing.triton_aot`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Launch:
    """One kernel with the types and constants of one launch."""

    name: str
    kernel: Any
    signature: Mapping[str, str]
    """Triton type of each argument that is no constant: "*bf16", "i32", "fp32", or "i32:16" for multiples of 16."""
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """num_warps, num_stages, enable_fp_fusion."""
