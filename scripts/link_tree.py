"""Builds .typing/dovetail, a tree of links that looks like the installed package.

Static tools (mypy, import-linter, griffe) do not follow the import hook of an editable install, so they cannot see
that core/ is `dovetail` and plugins/ is `dovetail.plugins`. They read this tree instead.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "plugins": "plugins",
    "attention_backends": "attention_backends",
    "executors": "executors",
    "schedulers": "schedulers",
    "spec_decode": "spec_decode",
    "vllm": "vllm_names",
}
"""Sub-package of dovetail -> folder of the repository."""


def main() -> None:
    """Makes the tree anew."""
    tree = ROOT / ".typing" / "dovetail"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for entry in (ROOT / "core").iterdir():
        if entry.name != "__pycache__":
            (tree / entry.name).symlink_to(entry)
    for package, folder in FOLDERS.items():
        (tree / package).symlink_to(ROOT / folder)


if __name__ == "__main__":
    main()
