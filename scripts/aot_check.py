"""Compiles every kernel that is declared for GPUs, in bfloat16, with the Triton that Python finds, and holds each to
tests/kernels/limits.json. Needs no GPU. Prints one line of JSON per kernel; `make test-triton-versions` reads them.

    python scripts/aot_check.py --arch 90 80
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import aot_operators
import aot_report

from dovetail.attention_backends.paged_triton.aot import Variant
from dovetail.attention_backends.paged_triton.machine import lacks_e5m2
from dovetail.attention_backends.triton_mla import aot as latents
from dovetail.nn.triton_launch import Launch
from dovetail.testing.triton_aot import KernelResources, compile_launch

LIMITS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "tests" / "kernels" / "limits.json").read_text())
FEATURES = "all features"
NAMED = 120
"""Characters of an error that are kept."""


@dataclass(frozen=True)
class Found:
    """One kernel: what it takes, and why that is not right."""

    version: str
    arch: int
    kernel: str
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    problem: str = ""


def launches(version: str, arch: int) -> Iterator[tuple[str, Launch]]:
    """Each kernel and its name: of attention with pages of bfloat16 (then as batch-invariant rows take it, and with
    all features over pages of float8, where these are not refused), of latent vectors, of the operators and of
    quantization."""
    for launch, words in aot_report.launches(Variant(), arch):
        yield launch.name + (", rotates" if words == "rotates" else ""), launch
    every = frozenset({"window", "cap", "slopes", "sinks"})
    more = {"invariant": Variant(is_invariant=True)}
    if not lacks_e5m2(version, arch):
        more[FEATURES] = Variant(kv_dtype="float8_e5m2", features=every)
    for words, variant in more.items():
        for launch, _ in aot_report.launches(variant, arch):
            if launch.name.startswith("attend"):
                yield f"{launch.name}, {words}", launch
    invariant = latents.attend_launch(latents.LatentVariant(arch, is_invariant=True), "verify")
    for launch in (*latents.launches(arch), invariant):
        yield launch.name, launch
    for launch in aot_operators.launches():
        if aot_operators.runs_on(launch, arch):
            yield launch.name, launch


def find(version: str, arch: int, name: str, launch: Launch) -> Found:
    """Compiles one; what fails is a finding as well."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # where ptxas fails, Triton prints the whole kernel
            used = compile_launch(launch, arch)
    except Exception as error:  # of Triton, of its compiler, or of ptxas
        return Found(version, arch, name, problem=f"{type(error).__name__}: {str(error).strip()}"[:NAMED])
    taken = used.registers, used.stack_bytes, used.shared_bytes
    return Found(version, arch, name, *taken, problem=excess(version, arch, name, used))


def excess(version: str, arch: int, name: str, used: KernelResources) -> str:
    """Which limit the kernel is over."""
    kind = "attend, all features" if name.endswith(FEATURES) else name.partition(" ")[0]
    stack = LIMITS["stack of versions"].get(
        f"{version}, sm_{arch}, {name}", LIMITS["stack"].get(kind, LIMITS["stack"]["others"])
    )
    shared = LIMITS["shared"][str(arch)]
    over = []
    if used.stack_bytes > stack:
        over.append(f"{used.stack_bytes} bytes of stack, {stack} allowed")
    if used.shared_bytes > shared:
        over.append(f"{used.shared_bytes} bytes of shared memory, {shared} there are")
    return "; ".join(over)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles every kernel and holds it to the limits.")
    parser.add_argument(
        "--arch", type=int, nargs="+", default=[90, 80], choices=[int(arch) for arch in LIMITS["shared"]]
    )
    arguments = parser.parse_args()
    version = metadata.version("triton")
    for arch in arguments.arch:
        for name, launch in launches(version, arch):
            print(json.dumps(asdict(find(version, arch, name, launch))), flush=True)


if __name__ == "__main__":
    main()
