"""What the inner loops of the Triton kernels take in instructions, for compute capability 9.0, against their budgets.

    python scripts/kernel_loops.py             # the table
    python scripts/kernel_loops.py --write     # and the budgets anew, after a change that is meant

Needs Triton but no GPU. tests/kernels/test_budgets.py holds the kernels to tests/kernels/budgets.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from dovetail.attention_backends.paged_triton.aot import Variant, attend_launch
from dovetail.attention_backends.paged_triton.configs import KINDS, find_config
from dovetail.attention_backends.triton_mla import aot as latents
from dovetail.nn.triton_launch import Launch
from dovetail.plugins.operators.triton import aot as operators
from dovetail.plugins.quantization.int4 import aot as int4
from dovetail.testing.kernel_loops import innermost_loops, whole_kernel
from dovetail.testing.triton_aot import compile_launch

ARCH = 90
BUDGETS = Path(__file__).parents[1] / "tests" / "kernels" / "budgets.json"
COUNTED = ("SHFL", "BAR", "FMUL", "LDG", "LDL", "STL")
MARGIN = 1.05
"""Of the instructions: compilers place them a little differently. What is counted by name has no margin."""


def launches() -> Iterator[Launch]:
    """The kernels that have budgets, as a large model in bfloat16 launches them."""
    yield from operators.launches()
    yield from int4.launches()
    for kind in KINDS:
        yield attend_launch(Variant(), find_config(ARCH, 128, 2, kind))
    yield from latents.attend_launches(ARCH)


def costs(launch: Launch) -> dict[str, int]:
    """The most that an innermost loop of the kernel takes, of each; of a kernel without loops, what all of it takes."""
    cubin = compile_launch(launch, ARCH).cubin
    loops = innermost_loops(cubin) or [whole_kernel(cubin)]
    found = {"instructions": max(loop.instructions for loop in loops)}
    found |= {name: max(loop.counts.get(name, 0) for loop in loops) for name in COUNTED}
    return found | {"narrow loads": max(loop.narrow_loads for loop in loops)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Instructions of the kernels' inner loops.")
    parser.add_argument("--write", action="store_true", help="make what is found the budgets")
    arguments = parser.parse_args()
    found = {}
    print(f"{'kernel':34} {'instructions':>12} " + " ".join(f"{name:>5}" for name in (*COUNTED, "narrow")))
    for launch in launches():
        found[launch.name] = cost = costs(launch)
        print(f"{launch.name:34} " + " ".join(f"{n:12}" if not i else f"{n:5}" for i, n in enumerate(cost.values())))
    if arguments.write:
        about = {
            "triton": metadata.version("triton"),
            "compute capability": ARCH / 10,
            "date": datetime.date.today().isoformat(),
            "margin": MARGIN,
        }
        BUDGETS.write_text(json.dumps({"about": about, "kernels": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
