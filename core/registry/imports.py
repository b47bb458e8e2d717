"""Other Python processes that import what this one can, and nothing else."""

from __future__ import annotations

import os
import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module, with the environment of `import_environment`.

    The working folder is left out of the imports (`-P`): a file `http.py` in it would take the place of the library's,
    and a plugin could be imported that is not installed.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def import_environment() -> dict[str, str]:
    """This process's environment, with its `sys.path` as PYTHONPATH: in the other process a reference such as
    `package.module:Class` means the same."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}
