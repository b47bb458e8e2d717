"""Compiles the kernels of the `triton` operators and of `int4` for GPUs that are not here and prints what they take.

python scripts/aot_operators.py [--dtype bf16] [--arch 80 90 100]
"""

from __future__ import annotations

import argparse

from dovetail.plugins.operators.triton import aot as operators
from dovetail.plugins.quantization.int4 import aot as int4
from dovetail.testing.triton_aot import compile_launch


def main() -> None:
    """One line per kernel and architecture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100])
    arguments = parser.parse_args()
    print(f"{'arch':>4} {'kernel':26} {'registers':>9} {'shared':>7} {'stack':>6}")
    for arch in arguments.arch:
        for launch in [*operators.launches(arguments.dtype), *int4.launches(arguments.dtype)]:
            used = compile_launch(launch, arch)
            print(
                f"{arch:4} {launch.name:26} {used.registers:9} {used.shared_bytes:7} {used.stack_bytes:6}", flush=True
            )


if __name__ == "__main__":
    main()
