"""How the kernels are launched, as data: for compiling them where there is no GPU (`dovetail.testing.triton_aot`).

Constants are those of `Launcher`, so what is compiled is what runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.attention_backends.paged_triton.configs import KernelConfig
from dovetail.attention_backends.paged_triton.kernels import attend, merge_parts
from dovetail.attention_backends.paged_triton.launch import WRITE_OPTIONS, Launcher, attend_options, merge_options
from dovetail.attention_backends.paged_triton.writing import write_pages
from dovetail.contracts.attention import AttentionLayer, AttentionSetup
from dovetail.contracts.kv import KVSpec
from dovetail.nn.triton_launch import Launch

TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int8": "i8",
}
_POINTERS = {
    "tokens": "i32",
    "table": "i32",
    "tree": "u8",
    "items": "i32",
    "visits": "i32",
    "blocks": "i32",
    "merges": "i32",
    "members": "i32",
    "shifts": "i32",
    "partials": "fp32",
    "sums": "fp32",
    "alibi": "fp32",
    "sinks": "fp32",
}
_FLOATS = ("factor", "cap", "value_scale", "inverse_key_scale", "inverse_value_scale", "largest")
_UNALIGNED = ("window", "stride_blocks", "local_blocks", "sink_blocks")


@dataclass(frozen=True)
class Variant:
    """What layers and pages a kernel is compiled for."""

    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    head_size: int = 128
    group: int = 4
    num_kv_heads: int = 8
    block_size: int = 16
    features: frozenset[str] = frozenset()
    """Of "window", "cap", "slopes", "sinks"."""
    sparse: int = 0
    is_invariant: bool = False
    """As `AttentionSetup.batch_invariant`."""

    @property
    def layer(self) -> AttentionLayer:
        """A layer with these features."""
        num_heads = self.group * self.num_kv_heads
        return AttentionLayer(
            0,
            num_heads,
            self.num_kv_heads,
            self.head_size,
            scale=1.0,
            window=1024 if "window" in self.features else None,
            soft_cap=50.0 if "cap" in self.features else None,
            alibi_slopes=(1.0,) * num_heads if "slopes" in self.features else None,
            sinks=torch.zeros(num_heads) if "sinks" in self.features else None,
        )

    def launcher(self) -> Launcher:
        """On the CPU, to ask for constants."""
        spec = KVSpec(num_kv_heads=self.num_kv_heads, head_size=self.head_size, dtype=self.kv_dtype)
        setup = AttentionSetup(
            (self.layer,), spec, self.block_size, self.dtype, "cpu", 1, 1, 1, batch_invariant=self.is_invariant
        )
        return Launcher(setup, 80)


def attend_launch(variant: Variant, config: KernelConfig) -> Launch:
    """The attention kernel."""
    constants = variant.launcher().attend_constants(variant.layer, config, variant.sparse)
    return _launch(f"attend {config.kind}", attend, variant, constants, attend_options(config, variant.is_invariant))


def write_launch(variant: Variant, rotary: int = 0) -> Launch:
    """The kernel that writes new keys and values into pages, and turns `rotary` elements of each query and key."""
    _, constants = variant.launcher().write_constants(variant.layer, rotary)
    return _launch("write_pages", write_pages, variant, constants, WRITE_OPTIONS)


def merge_launch(variant: Variant) -> Launch:
    """The kernel that puts the parts of tiles together."""
    constants = variant.launcher().merge_constants(variant.layer)
    return _launch("merge_parts", merge_parts, variant, constants, merge_options(variant.is_invariant))


def _launch(
    name: str, kernel: Any, variant: Variant, constants: Mapping[str, Any], options: Mapping[str, Any]
) -> Launch:
    signature = {argument: _type_of(argument, variant) for argument in kernel.arg_names if argument not in constants}
    return Launch(name, kernel, signature, constants, options)


def _type_of(name: str, variant: Variant) -> str:
    if name in _POINTERS:
        return f"*{_POINTERS[name]}"
    if name == "kv_cache":
        return f"*{TYPES[variant.kv_dtype]}"
    if name == "scales":
        return "*fp16" if variant.kv_dtype == "int8" else f"*{TYPES[variant.kv_dtype]}"
    if name in ("query", "key", "value", "cos", "sin", "output"):
        return f"*{TYPES[variant.dtype]}"
    if name in _FLOATS:
        return "fp32"
    # As at run time: strides that are multiples of 16 are known to be.
    return "i32" if name in _UNALIGNED else "i32:16"
