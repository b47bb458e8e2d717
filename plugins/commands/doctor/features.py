"""Instruction sets that matter to inference, what they are for, and how a kernel's source asks for them."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class InstructionSet:
    """One instruction set, or several that go together."""

    label: str
    needs: frozenset[str]
    """Names in /proc/cpuinfo, all of which must be there."""
    purpose: str
    macros: str
    """Pattern of the compiler's macros that guard code for it."""


def _set(label: str, needs: str, purpose: str, macros: str) -> InstructionSet:
    return InstructionSet(label, frozenset(needs.split()), purpose, macros)


_X86 = (
    _set("AVX2", "avx2", "everything in float32, integers of 256 bits", r"__AVX2__"),
    _set("FMA", "fma", "twice the float32 products", r"__FMA__"),
    _set("F16C", "f16c", "reads float16 weights and scales", r"__F16C__"),
    _set("AVX-512", "avx512f avx512bw avx512vl", "everything, 512 bits wide", r"__AVX512(F|BW|VL)__"),
    _set("AVX-512 VNNI", "avx512_vnni", "int8 and int4 products", r"__AVX512VNNI__"),
    _set("AVX-VNNI", "avx_vnni", "int8 and int4 products in 256 bits", r"__AVXVNNI__"),
    _set("AVX-512 BF16", "avx512_bf16", "bfloat16 products", r"__AVX512BF16__"),
    _set("AMX BF16", "amx_tile amx_bf16", "bfloat16 prefill", r"__AMX_BF16__"),
    _set("AMX INT8", "amx_tile amx_int8", "int8 prefill", r"__AMX_INT8__"),
)
_ARM = (
    _set("NEON", "asimd", "everything in float32", r"__ARM_NEON\b"),
    _set("FP16", "asimdhp", "float16 arithmetic", r"__ARM_FEATURE_FP16_VECTOR_ARITHMETIC"),
    _set("dot products", "asimddp", "int8 and int4 products", r"__ARM_FEATURE_DOTPROD"),
    _set("I8MM", "i8mm", "int8 prefill", r"__ARM_FEATURE_MATMUL_INT8"),
    _set("BF16", "bf16", "bfloat16 products", r"__ARM_FEATURE_BF16"),
    _set("SVE", "sve", "everything, in wider vectors", r"__ARM_FEATURE_SVE\b"),
)
INSTRUCTION_SETS = (*_X86, *_ARM)

_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def instruction_sets(architecture: str) -> tuple[InstructionSet, ...]:
    """Those that a processor of this architecture may have; none for one that is not known here."""
    if architecture.lower() in ("x86_64", "amd64", "i686"):
        return _X86
    return _ARM if architecture.lower() in ("aarch64", "arm64") else ()


def features_in(source: str) -> frozenset[str]:
    """Labels of the instruction sets for which C source has code of its own."""
    return frozenset(entry.label for entry in INSTRUCTION_SETS if re.search(entry.macros, source))


def multiplies_bfloat16(features: frozenset[str]) -> bool:
    """Whether the processor has instructions for bfloat16 products."""
    return bool(features & _BFLOAT16)
