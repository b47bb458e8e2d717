"""Triton kernels compiled ahead of time for GPUs that are not here: what they take in registers and shared memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.nn.triton_launch import FP_FUSION, Launch


@dataclass(frozen=True)
class KernelResources:
    """What one compiled kernel takes."""

    registers: int
    """Per thread."""
    shared_bytes: int
    """Per program."""
    stack_bytes: int
    """Per thread, in local memory: spilled registers, among other things."""
    cubin: bytes = field(default=b"", repr=False)
    """What a GPU loads: see `dovetail.testing.kernel_loops`."""


def compile_launch(launch: Launch, arch: int) -> KernelResources:
    """`compile_kernel` for one launch."""
    return compile_kernel(launch.kernel, launch.signature, launch.constants, arch, **launch.options)


def compile_kernel(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], arch: int, **options: Any
) -> KernelResources:
    """Compiles a `triton.jit` function for compute capability `arch` (80, 90, 100) and asks cuobjdump.

    `signature` gives the Triton type of each argument that is not in `constants` ("*bf16", "i32", "fp32"), with ":16"
    behind it for numbers that are multiples of 16; pointers are taken to be aligned to 16 bytes, as torch's are.
    `options`: num_warps, num_stages, enable_fp_fusion. Raises what Triton raises.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wanted = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    types, attributes = split_types(wanted)
    source = ASTSource(fn=kernel, signature=types, constexprs=dict(constants), attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={**FP_FUSION, **options})
    stack, registers = _usage(compiled.asm["cubin"])
    return KernelResources(registers, compiled.metadata.shared, stack, compiled.asm["cubin"])


def split_types(signature: Mapping[str, str]) -> tuple[dict[str, str], dict[tuple[int], list[list[Any]]]]:
    """Types as Triton wants them, and, by the argument's index, properties of the values."""
    types = {name: kind.removesuffix(":16") for name, kind in signature.items()}
    divisible = (kind.startswith("*") or kind.endswith(":16") for kind in signature.values())
    return types, {(place,): [["tt.divisibility", 16]] for place, is_so in enumerate(divisible) if is_so}


def _usage(cubin: bytes) -> tuple[int, int]:
    """(stack bytes, registers) by the tool that Triton brings along."""
    text = inspect_cubin(cubin, "--dump-resource-usage")
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if match is None:
        raise ValueError(f"cuobjdump says nothing of registers: {text!r}")
    return int(match[2]), int(match[1])


def inspect_cubin(cubin: bytes, what: str) -> str:
    """What the cuobjdump that Triton brings along says of it: "--dump-resource-usage", or "--dump-sass"."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), what, file.name], check=True, capture_output=True, text=True).stdout
