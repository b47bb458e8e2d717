"""The launch of a Triton kernel as data, so that a plugin's kernels can be compiled without a GPU
(`dovetail.testing.triton_aot`), and what every launch states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

FP_FUSION: Mapping[str, Any] = MappingProxyType({"enable_fp_fusion": True})
"""Options of every launch that does not choose others: a product and a sum may become one instruction, with one
rounding. Versions of Triton differ in the default (3.9: on, 3.10: off), and with it numbers and speed would change."""


@dataclass(frozen=True)
class Launch:
    """One kernel with the types and constants of one launch."""

    name: str
    kernel: Any
    signature: Mapping[str, str]
    """Triton type of each argument that is no constant: "*bf16", "i32", "fp32", or "i32:16" for multiples of 16."""
    constants: Mapping[str, Any]
    """Values of `tl.constexpr` arguments, and of integers that are 1: Triton compiles these as constants too."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """num_warps, num_stages, enable_fp_fusion."""
