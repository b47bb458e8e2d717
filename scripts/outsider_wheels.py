"""Builds the wheels of outsiders: each frozen plugin of tests/frozen/v1 as a distribution of its own, as a third party
would write it. Run by `make wheel-outsiders`.

python scripts/outsider_wheels.py DIRECTORY    writes the projects to DIRECTORY, and their wheels to DIRECTORY/dist
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "dovetail_frozen_v1"
"""A namespace package: each distribution has one module of it."""
PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "dovetail-frozen-v1-{name}"
version = "1.0"
dependencies = ["dovetail>=0.1"]

[project.entry-points."dovetail.{kind}.v1"]
frozen = "{reference}"

[tool.setuptools]
packages = ["{package}"]
"""


def write_project(source: Path, directory: Path) -> None:
    """Writes the project of one plugin, whose module is named for its kind."""
    kind = source.stem
    package = directory / PACKAGE
    package.mkdir(parents=True)
    shutil.copy(source, package)
    # The plugin of a kind is a class; of hooks it is the module.
    reference = f"{PACKAGE}.{kind}" + ("" if kind == "hooks" else ":Frozen")
    values = {"name": kind.replace("_", "-"), "kind": kind, "reference": reference, "package": PACKAGE}
    (directory / "pyproject.toml").write_text(PROJECT.format(**values))


def build_wheel(project: Path, target: Path) -> None:
    """Raises `CalledProcessError` where it cannot be built."""
    build = ["build", "--wheel", "--no-isolation", "--outdir", str(target), str(project)]
    subprocess.run([sys.executable, "-m", *build], check=True, stdout=subprocess.DEVNULL)


def main(target: Path) -> None:
    """Builds all; raises `CalledProcessError` at the first that cannot be built."""
    shutil.rmtree(target, ignore_errors=True)
    for source in sorted((ROOT / "tests" / "frozen" / "v1").glob("*.py")):
        project = target / source.stem
        write_project(source, project)
        build_wheel(project, target / "dist")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
