"""Compiles the kernels for an architecture without a GPU, and reads what they need of it.

`ptxas` comes with Triton; its own report (`-v`) names registers, shared memory and the bytes that spill.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from dovetail.attention_backends.paged_triton.configs import KernelConfig
from dovetail.attention_backends.paged_triton.kernels import attend, merge_parts
from dovetail.attention_backends.paged_triton.launch import padded_head, write_sizes
from dovetail.attention_backends.paged_triton.writing import write_pages

TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int8": "i8",
}
_COMPUTE = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}
_POINTERS = {
    "tokens": "i32",
    "table": "i32",
    "tree": "u8",
    "items": "i32",
    "visits": "i32",
    "blocks": "i32",
    "merges": "i32",
    "shifts": "i32",
    "partials": "fp32",
    "sums": "fp32",
    "alibi": "fp32",
}
_FLOATS = ("scale", "soft_cap", "value_scale", "inverse_key_scale", "inverse_value_scale", "largest")
_UNALIGNED = ("window", "stride_blocks", "local_blocks", "sink_blocks")


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs."""

    registers: int
    """For each thread."""
    shared_bytes: int
    spill_bytes: int
    """Stores and loads of spilled registers, for each thread."""


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
    """Of "window", "cap", "slopes"."""
    sparse: int = 0


def compile_attend(variant: Variant, config: KernelConfig, arch: int) -> Resources:
    """The attention kernel."""
    constants = {
        "GROUP": variant.group,
        "NUM_KV_HEADS": variant.num_kv_heads,
        "HEAD": variant.head_size,
        "HEAD_PAD": padded_head(variant.head_size),
        "PAGE": variant.block_size,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "COMPUTE": _COMPUTE[variant.dtype],
        "PRECISION": "ieee" if variant.dtype == "float32" else "tf32",
        "IS_INT8": variant.kv_dtype == "int8",
        "HAS_WINDOW": "window" in variant.features,
        "HAS_CAP": "cap" in variant.features,
        "HAS_SLOPES": "slopes" in variant.features,
        "TREES": config.kind == "verify",
        "SPARSE": variant.sparse,
    }
    return _compile(attend, variant, constants, arch, num_warps=config.num_warps, num_stages=config.num_stages)


def compile_write(variant: Variant, arch: int, rotary: int = 0) -> Resources:
    """The kernel that writes new keys and values into pages, and turns `rotary` elements of each query and key."""
    head_pad = padded_head(variant.head_size)
    num_heads = variant.group * variant.num_kv_heads if rotary else 0
    _, sizes = write_sizes(num_heads, variant.num_kv_heads, head_pad, rotary)
    constants = {
        **sizes,
        "HEAD": variant.head_size,
        "HEAD_PAD": head_pad,
        "PAGE": variant.block_size,
        "IS_FP8": variant.kv_dtype.startswith("float8"),
        "IS_INT8": variant.kv_dtype == "int8",
    }
    return _compile(write_pages, variant, constants, arch, num_warps=4, num_stages=3, enable_fp_fusion=False)


def compile_merge(variant: Variant, config: KernelConfig, arch: int) -> Resources:
    """The kernel that puts the parts of tiles together."""
    constants = {
        "GROUP": variant.group,
        "NUM_KV_HEADS": variant.num_kv_heads,
        "HEAD": variant.head_size,
        "HEAD_PAD": padded_head(variant.head_size),
        "BLOCK_M": config.block_m,
        "BLOCK_P": 16,
    }
    return _compile(merge_parts, variant, constants, arch, num_warps=4, num_stages=3)


def _compile(kernel: Any, variant: Variant, constants: Mapping[str, Any], arch: int, **options: Any) -> Resources:
    signature = {name: _type_of(name, variant, constants) for name in kernel.arg_names}
    # As at run time: addresses and strides that are multiples of 16 are known to be.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or (kind == "i32" and name not in _UNALIGNED)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(constants), attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return _resources(compiled.asm["ptx"], compiled.metadata.shared, arch)


def _type_of(name: str, variant: Variant, constants: Mapping[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if name in _POINTERS:
        return f"*{_POINTERS[name]}"
    if name == "kv_cache":
        return f"*{TYPES[variant.kv_dtype]}"
    if name == "scales":
        return "*fp16" if variant.kv_dtype == "int8" else f"*{TYPES[variant.kv_dtype]}"
    if name in ("query", "key", "value", "cos", "sin", "output"):
        return f"*{TYPES[variant.dtype]}"
    return "fp32" if name in _FLOATS else "i32"


def _resources(ptx: str, shared_bytes: int, arch: int) -> Resources:
    found = re.search(r"\.target\s+(sm_\w+)", ptx)
    assert found is not None, "PTX names its target"
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={found[1]}", source, "-o", Path(work) / "kernel.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = {what: int(count) for count, what in re.findall(r"(\d+) bytes (spill stores|spill loads)", report)}
    registers = re.search(r"Used (\d+) registers", report)
    assert registers is not None, f"ptxas reported no registers: {report}"
    return Resources(int(registers[1]), shared_bytes, sum(numbers.values()))
