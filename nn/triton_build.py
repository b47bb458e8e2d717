"""Whether Triton can build the small C module with which it loads and launches kernels.

Triton compiles kernels by itself (`triton_check`), but at the first launch of a process it has a C compiler build a
module against Python's headers, unless its cache has one from before. Triton 3.4 to 3.9 look for the compiler in the
same way: the variable CC, then gcc, then clang.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from dovetail.contracts.plugin import FixableReason

_INCLUDE_VARIABLES = ("CPATH", "C_INCLUDE_PATH")
"""Where gcc and clang look for headers besides."""


def reasons_against_building(named: str) -> list[str]:
    """Why a first launch would fail; `named` is Triton with its version. Empty on systems where Triton brings a
    compiler of its own."""
    if os.name != "posix":
        return []
    begins = f"{named} builds a small C module at its first launch, and there is no"
    reasons: list[str] = []
    given = os.environ.get("CC")
    if given is not None and shutil.which(given) is None:
        reasons.append(FixableReason(f"{begins} C compiler {given!r}, which CC names: correct CC, or unset it."))
    if given is None and not (shutil.which("gcc") or shutil.which("clang")):
        reasons.append(
            FixableReason(f"{begins} C compiler here: install gcc (Debian: apt-get install gcc libc6-dev), or set CC.")
        )
    folder = python_include()
    if not any((Path(each) / "Python.h").is_file() for each in (folder, *_more_folders())):
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        reasons.append(
            FixableReason(
                f"{begins} Python.h in {folder}: install the headers of Python {version} (Debian: apt-get install "
                f"python{version}-dev), or use a Python that has them."
            )
        )
    return reasons


def python_include() -> str:
    """The folder in which Triton expects Python.h."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder without headers; Triton takes the usual one as well.
    return sysconfig.get_paths(scheme="posix_prefix" if scheme == "posix_local" else scheme)["include"]


def _more_folders() -> list[str]:
    return [folder for name in _INCLUDE_VARIABLES for folder in os.environ.get(name, "").split(os.pathsep) if folder]
