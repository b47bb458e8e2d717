"""What the suites of several kinds check in the same way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.contracts.kinds import KINDS
from dovetail.contracts.plugin import Plugin


def check_contract(plugin: type[Plugin], kind: str) -> None:
    """Asserts that the plugin declares a version of its kind's contract that this host speaks."""
    version = KINDS[kind].version
    declared = plugin.contract
    assert declared[0] == version.major, f"{plugin.__name__} declares {kind} {declared}, the host speaks {version}"
    assert declared[1] <= version.minor, f"{plugin.__name__} declares {kind} {declared}, the host speaks {version}"


def check_light_import(module: str, then: str = "") -> None:
    """Asserts that a new process that imports `module`, and runs the statement `then` with it as `module`, has imported
    neither torch nor transformers."""
    code = (
        "import importlib, sys; module = importlib.import_module(sys.argv[1]); "
        f"{then or 'pass'}; sys.exit(', '.join({{'torch', 'transformers'}} & set(sys.modules)) or None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, module],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 0, f"importing {module} imports {done.stderr.strip()}"


@contextmanager
def leaves_process_alone() -> Iterator[None]:
    """Asserts that what runs inside leaves working directory, environment and import path as they were."""
    before = (Path.cwd(), dict(os.environ), list(sys.path))
    yield
    assert (Path.cwd(), dict(os.environ), list(sys.path)) == before, "it changes the process that it runs in"


@contextmanager
def leaves_files_alone(path: Path) -> Iterator[None]:
    """Asserts that what runs inside changes, adds and removes no file of a directory, or not this one file."""
    before = _listing(path)
    yield
    assert _listing(path) == before, f"it changes {path}, which was there before, and which others may read"


def _listing(path: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of change of all files."""
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    return {file: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}
