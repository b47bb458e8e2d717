"""Each distribution of examples/plugins passes its own tests from the tree, by itself."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.config.schema import EngineConfig
from dovetail.testing.local_plugins import write_distribution

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "plugins"
ALL = sorted(path.parent.name for path in FOLDER.glob("*/pyproject.toml"))
PUBLIC = (
    "dovetail.contracts",
    "dovetail.nn",
    "dovetail.schedulers.batching",
    "dovetail.schedulers.ranked_queue",
    "dovetail.executors.processes",
    "dovetail.commands",
)
"""What docs/plugins.md lets a plugin import."""


def project(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / name / "pyproject.toml").read_text(encoding="utf-8"))


def imported(file: Path) -> set[str]:
    """Modules of Dovetail that a file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            # `from dovetail.nn import rope` may name a module or what is in one.
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {module for module in found if module.partition(".")[0] == "dovetail"}


@pytest.mark.parametrize("name", ALL)
def test_its_own_tests_pass(name: str, tmp_path: Path) -> None:
    """Installed as `pip install -e` would have it, and no other example beside it."""
    folder, metadata = FOLDER / name, project(name)["project"]
    write_distribution(tmp_path, name, version=metadata["version"], entry_points=metadata["entry-points"])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder / "src"), str(tmp_path)))}
    options = ["-q", "-m", "not slow", "-c", str(folder / "pyproject.toml"), "--rootdir", str(folder)]
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", str(folder / "tests")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout


@pytest.mark.parametrize("name", ALL)
def test_it_imports_what_is_public(name: str) -> None:
    files = sorted((FOLDER / name / "src").rglob("*.py"))
    modules = set().union(*(imported(file) for file in files))
    assert modules, "it imports nothing of Dovetail"
    assert {module for module in modules if not module.startswith(PUBLIC)} == set()


@pytest.mark.parametrize("name", ALL)
def test_it_is_complete(name: str) -> None:
    """The table of the README has it, and compare.yaml has two configs whose sections exist."""
    folder = FOLDER / name
    assert project(name)["project"]["name"] == name
    assert (folder / "README.md").read_text(encoding="utf-8").startswith(f"# {name}\n")
    assert f"[{name}]({name})" in (FOLDER / "README.md").read_text(encoding="utf-8")
    compared = yaml.safe_load((folder / "compare.yaml").read_text(encoding="utf-8"))
    assert compared["tokens"] in ("equal", "may differ")
    for which in ("bundled", "ours"):
        assert compared[which].keys() <= EngineConfig.model_fields.keys()
