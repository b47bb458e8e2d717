"""Makes the source tree importable without installing it: `.plain/dovetail` as links, and beside it the metadata that
entry points are read from, made from pyproject.toml. Wheels in a folder are unpacked there too.

    python scripts/gpu_check/plain_tree.py [FOLDER_WITH_WHEELS]

Prints the folder to put on PYTHONPATH.
"""

from __future__ import annotations

import runpy
import shutil
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
link_tree = runpy.run_path(str(ROOT / "scripts" / "link_tree.py"))["link_tree"]


def main() -> None:
    """Makes the tree anew."""
    tree = ROOT / ".plain"
    shutil.rmtree(tree, ignore_errors=True)
    link_tree(tree / "dovetail")
    write_metadata(tree)
    if len(sys.argv) > 1:
        for wheel in sorted(Path(sys.argv[1]).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(tree)
    print(tree)


def write_metadata(tree: Path) -> None:
    """A dist-info folder, as an installer would leave it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tree / f"dovetail-{project['version']}.dist-info"
    info.mkdir()
    required = "".join(f"Requires-Dist: {name}\n" for name in project["dependencies"])
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: dovetail\nVersion: {project['version']}\n{required}"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), ""]
    info.joinpath("entry_points.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
