"""What computes on this machine: torch, the compiler, and the native kernels that installed plugins bring."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import torch

from dovetail.commands import detect_environment
from dovetail.contracts.kinds import KINDS
from dovetail.contracts.plugin import Environment, FixableReason
from dovetail.nn.native import INCLUDE, find_compilers, reasons_against
from dovetail.nn.triton_check import reasons_against_triton
from dovetail.plugins.commands.doctor.facts import GPUs, Kernel, Software
from dovetail.plugins.commands.doctor.features import features_in


def examine_software() -> Software:
    """Asks torch, and compiles the kernels that were not compiled before (seconds each, the first time)."""
    return Software(
        torch_version=torch.__version__,
        torch_level=torch.backends.cpu.get_cpu_capability(),
        torch_threads=torch.get_num_threads(),
        openmp=torch.backends.openmp.is_available(),  # type: ignore[no-untyped-call]
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        compilers=tuple(find_compilers()),
        kernels=tuple(examine_kernel(source) for source in sorted(_sources())),
        gpus=examine_gpus(detect_environment()),
    )


def examine_gpus(environment: Environment) -> GPUs:
    """What `environment` says of GPUs; where there are some, asks Triton too."""
    if not environment.devices:
        why = environment.no_devices
        return GPUs(why_none=why, problems=(f"{why}.",) if isinstance(why, FixableReason) else ())
    names = tuple(device.name for device in environment.devices)
    return GPUs(names, problems=(*reasons_against_triton(environment), *environment.mismatches))


def examine_kernel(source: Path) -> Kernel:
    """Compiles one source, if that was not done yet, and reads for which instruction sets it has code."""
    problems = reasons_against(source)
    text = "\n".join(path.read_text(errors="replace") for path in (source, *source.parent.glob("*.h")))
    shared = [path for path in INCLUDE.rglob("*.h") if path.relative_to(INCLUDE).as_posix() in text]
    text = "\n".join((text, *(path.read_text(errors="replace") for path in shared)))
    name = "/".join((*_package(source), source.name))
    return Kernel(name, problems[0] if problems else None, features_in(text))


def _package(source: Path) -> tuple[str, ...]:
    return source.parent.parts[-2:]


def _sources() -> set[Path]:
    """C files next to the modules of installed plugins; found from metadata, no plugin is imported."""
    return {source for folder in _plugin_folders() for source in folder.glob("*.c")}


def _plugin_folders() -> Iterator[Path]:
    for point in (point for kind in KINDS.values() for point in entry_points(group=kind.group)):
        try:
            spec = find_spec(point.module)
        except Exception:  # a broken package is for `dovetail plugins doctor` to tell
            continue
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).resolve().parent
