"""Builds .typing/dovetail, a tree of links that looks like the installed package.

Static tools (mypy, import-linter, griffe) do not follow the import hook of an editable install, so they cannot see
that core/ is `dovetail` and plugins/ is `dovetail.plugins`. They read this tree instead.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["dovetail"]["folders"]
"""Package -> folder of the repository; "dovetail" itself is the first."""


def link_tree(target: Path, without: str | None = None) -> None:
    """Makes `target`, a new folder, the package `dovetail`, one folder of the repository left out."""
    target.mkdir(parents=True)
    for entry in (ROOT / FOLDERS["dovetail"]).iterdir():
        if entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)
    for package, folder in FOLDERS.items():
        if package != "dovetail" and folder != without:
            (target / package.removeprefix("dovetail.")).symlink_to(ROOT / folder)


if __name__ == "__main__":
    shutil.rmtree(ROOT / ".typing", ignore_errors=True)
    link_tree(ROOT / ".typing" / "dovetail")
