"""The doctor says nothing about plugins that are right: the bundled ones, those that are frozen, the examples."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from dovetail.commands.diagnosis.asking import NEEDS
from dovetail.commands.diagnosis.surface import is_public, since
from dovetail.commands.installed import CODES, diagnose
from dovetail.contracts.kinds import KINDS
from dovetail.registry import Registry
from dovetail.testing.local_plugins import write_distribution

ROOT = Path(__file__).parents[3]
FROZEN = ROOT / "tests" / "frozen" / "v1"


@pytest.mark.nightly  # each is imported in a process of its own
def test_nothing_is_said_of_the_bundled_plugins():
    own = [entry for entry in Registry.scan().metadata.entries if entry.is_own]
    diagnosis = diagnose(Registry.scan(), [entry.qualified_name for entry in own])
    assert {entry.label for entry in own} <= {entry.label for entry in diagnosis.entries}
    assert [one for one in diagnosis.findings if "(dovetail " in one.subject] == []


def test_nothing_is_said_of_plugins_that_were_written_for_1_0(tmp_path, monkeypatch):
    files = sorted(FROZEN.glob("*.py"))
    points = {
        f"dovetail.{path.stem}.v1": {"frozen": f"frozen_v1.{path.stem}{':Frozen' if path.stem != 'hooks' else ''}"}
        for path in files
    }
    modules = {f"frozen_v1/{path.name}": path.read_text() for path in files} | {"frozen_v1/__init__.py": ""}
    write_distribution(tmp_path, "frozen", entry_points=points, modules=modules)
    monkeypatch.syspath_prepend(tmp_path)
    diagnosis = diagnose(Registry.scan(), ["frozen:frozen"])
    assert len(diagnosis.entries) == len(files)
    assert [one for one in diagnosis.findings if one.severity != "note"] == []


def test_nothing_is_said_of_the_examples():
    kinds = {KINDS[kind].base.rpartition(":")[2] for kind in KINDS}
    references = []
    folders = (ROOT / "examples", ROOT / "examples" / "schedulers", ROOT / "examples" / "train_drafters")
    for path in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        for node in ast.parse(path.read_text()).body:
            bases = {ast.unparse(base) for base in node.bases} if isinstance(node, ast.ClassDef) else set()
            if bases & (kinds | {"BatchingScheduler"}):
                references.append(f"{path}:{node.name}")
    diagnosis = diagnose(Registry.scan(), references)
    assert {entry.kind for entry in diagnosis.entries} == {"model_family", "scheduler", "draft_worker"}
    assert diagnosis.findings == ()


@pytest.mark.nightly
def test_nothing_is_said_of_the_example_distributions(monkeypatch):
    references = []
    for path in sorted((ROOT / "examples" / "plugins").glob("*/pyproject.toml")):
        monkeypatch.syspath_prepend(path.parent / "src")
        groups = tomllib.loads(path.read_text())["project"].get("entry-points", {})
        references += [value for group, points in groups.items() if ".v1" in group for value in points.values()]
    assert references
    diagnosis = diagnose(Registry.scan(), references)
    assert len(diagnosis.entries) == len(references)
    assert diagnosis.findings == ()


@pytest.mark.parametrize("kind", NEEDS)
def test_there_is_a_plain_need_for_every_kind_that_has_one(kind):
    module, _, name = (KINDS[kind].need or "").partition(":")
    need = NEEDS[kind]("cpu", "float32")
    assert (type(need).__module__, type(need).__name__) == (module, name)
    assert NEEDS.keys() == {name for name, each in KINDS.items() if each.need is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_what_each_minor_version_brought_is_listed_and_exists(kind):
    """A minor version without an entry in since.toml would let plugins through that need it and say less."""
    version = KINDS[kind].version
    listed = since(kind)
    assert set(listed.values()) == {(version.major, minor) for minor in range(1, version.minor + 1)}
    surface = "\n".join(path.read_text() for path in (ROOT / "docs" / "surface").glob("dovetail.contracts.*.pyi"))
    tree = ast.parse(surface)
    names = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    others = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    others |= {ast.unparse(target) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}
    for path in listed:
        owner, _, member = path.partition(".")
        if path in others:
            continue
        members = {
            each.target.id if isinstance(each, ast.AnnAssign) else getattr(each, "name", None)
            for each in names[owner].body
        }
        assert not member or member in members, path


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("dovetail.contracts.speculation", "Draft", True),
        ("dovetail.contracts.needs", "_sentences", False),
        ("dovetail.contracts", None, False),
        ("dovetail.nn._private", None, False),
        ("dovetail.nn.decoder", None, True),
        ("dovetail.engine.core", None, False),
        ("dovetail.config.schema", "ModelSection", True),
        ("dovetail.config.schema", "place_at", False),
        ("dovetail.testing.draft_suite", None, True),
    ],
)
def test_what_is_public(module, name, expected):
    assert is_public(module, name) is expected


def test_every_code_is_in_the_docs_with_an_example():
    text = (ROOT / "docs" / "doctor.md").read_text()
    assert [code for code in CODES if f"| `{code}` |" not in text] == []
