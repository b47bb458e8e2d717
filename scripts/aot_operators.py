"""Compiles the kernels of the `triton` operators and of quantization for GPUs that are not here and prints what they
take: registers a thread and bytes of its stack (spilled registers among them), as the table of docs/gpu.md.

python scripts/aot_operators.py [--dtype bf16] [--arch 80 90 100]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from dovetail.nn.triton_launch import Launch
from dovetail.plugins.operators.triton import aot as operators
from dovetail.plugins.quantization import int8_kernel as int8
from dovetail.plugins.quantization.int4 import aot as int4
from dovetail.plugins.quantization.w8a8 import aot as w8a8
from dovetail.testing.triton_aot import compile_launch

LEAST_FP8 = 89


def main() -> None:
    """One row per kernel, one column per architecture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100])
    arguments = parser.parse_args()
    print(f"| kernel | {' | '.join(f'sm_{arch}' for arch in arguments.arch)} |")
    print(f"| --- |{' --- |' * len(arguments.arch)}")
    for launch in launches(arguments.dtype):
        cells = (taken(launch, arch) for arch in arguments.arch)
        print(f"| {launch.name} | {' | '.join(cells)} |", flush=True)


def launches(dtype: str = "bf16") -> Iterator[Launch]:
    """Every kernel, with activations of `dtype`."""
    for module in (operators, int4, int8, w8a8):
        yield from module.launches(dtype)


def runs_on(launch: Launch, arch: int) -> bool:
    """Whether the GPU has the types: float8_e4m3fn came with 8.9."""
    return arch >= LEAST_FP8 or "*fp8e4nv" not in launch.signature.values()


def taken(launch: Launch, arch: int) -> str:
    """Registers and stack; nothing where the GPU lacks a type."""
    if not runs_on(launch, arch):
        return ""
    used = compile_launch(launch, arch)
    return f"{used.registers}, {used.stack_bytes}"


if __name__ == "__main__":
    main()
