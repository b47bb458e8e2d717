"""Checks whether Triton works here, for plugins with Triton kernels."""

from __future__ import annotations

import contextlib
import functools
import io

from dovetail.contracts.plugin import Environment, FixableReason
from dovetail.nn.triton_build import reasons_against_building

_PACKAGE = "triton"


def reasons_against_triton(environment: Environment) -> list[str]:
    """Returns why Triton cannot compile for the GPUs of `environment` or launch there, as reasons of `Plugin.check`;
    empty where it can.

    Imports Triton (80 MB that stay) and compiles a small kernel for each kind of GPU once per process, so make cheaper
    checks first. With TRITON_INTERPRET it compiles no kernel.
    """
    version = environment.packages.get(_PACKAGE, "")
    named = f"Triton {version}".strip()
    try:
        from triton import knobs

        from dovetail.nn.triton_probe import compile_probe  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == _PACKAGE:
            return [FixableReason(f"Triton is not installed: {_remedy(environment)}.")]
        return [_cannot_be_imported(named, error, environment)]
    except Exception as error:  # whatever a broken package raises
        return [_cannot_be_imported(named, error, environment)]
    if knobs.runtime.interpret:
        return []
    for major, minor in sorted({device.compute_capability for device in environment.devices}):
        problem = _problem(major * 10 + minor)
        if problem:
            told = f"{named} cannot compile for compute capability {major}.{minor} ({problem})"
            is_torchs = version == environment.torch_pins.get(_PACKAGE)
            remedy = "a newer torch, with its Triton, may" if is_torchs else _remedy(environment)
            return [FixableReason(f"{told}: {remedy}.")]
    return reasons_against_building(named) if environment.devices else []


def _cannot_be_imported(named: str, error: Exception, environment: Environment) -> str:
    return FixableReason(f"{named} cannot be imported ({_first_line(error)}): {_remedy(environment)}.")


def _remedy(environment: Environment) -> str:
    """What to install: the version that torch was built for, if known."""
    pin, torch = environment.torch_pins.get(_PACKAGE), environment.packages.get("torch", "")
    if pin is None:
        return "pip install --upgrade 'dovetail[triton]'"
    again = "--force-reinstall " if environment.packages.get(_PACKAGE) == pin else ""
    return f"pip install {again}triton=={pin}, which torch {torch} is built for"


@functools.cache
def _problem(arch: int) -> str:
    from dovetail.nn.triton_probe import compile_probe

    try:
        # Where ptxas fails, Triton prints the whole kernel.
        with contextlib.redirect_stdout(io.StringIO()):
            compile_probe(arch)
    except Exception as error:
        return _first_line(error)
    return ""


def _first_line(error: Exception) -> str:
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
