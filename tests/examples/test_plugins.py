"""Each distribution of examples/plugins is complete, and imports what is public. `make wheel-examples` runs their own
tests, each by itself and all together."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dovetail.config.schema import EngineConfig

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
