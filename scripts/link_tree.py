"""Builds .typing/dovetail, a tree of links that looks like the installed package.

Static tools (mypy, import-linter, griffe) do not follow the import hook of an editable install, so they cannot see
that core/ is `dovetail` and plugins/ is `dovetail.plugins`. They read this tree instead.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("plugins", "attention_backends", "executors", "schedulers", "spec_decode")


def main() -> None:
    """Makes the tree anew."""
    tree = ROOT / ".typing" / "dovetail"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for entry in (ROOT / "core").iterdir():
        if entry.name != "__pycache__":
            (tree / entry.name).symlink_to(entry)
    for folder in FOLDERS:
        (tree / folder).symlink_to(ROOT / folder)


if __name__ == "__main__":
    main()
