"""The page on compatibility says what classes declare, and `make check` notices where it does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from dovetail.contracts.attention import AttentionBackend, AttentionCapabilities
from dovetail.contracts.speculation import DraftCapabilities, DraftWorker, TreesByOption

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def compatibility(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("compatibility")


class Plain(DraftWorker):
    """Abstract as its base is: only what it declares is read."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = DraftCapabilities(trees=True)


class Branching(Plain, TreesByOption):
    capabilities = DraftCapabilities(trees=True, confidence=True)


def row(lines: list[str], name: str) -> list[str]:
    """Cells of the row that begins so."""
    (found,) = [line for line in lines if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def test_what_classes_declare_is_what_the_table_says(
    compatibility: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compatibility, "bundled", lambda kind: {"plain": Plain, "branching": Branching})
    found = {"draft_worker:plain": {"passed": 3, "skipped": 1, "failed": 0}}
    lines = compatibility.section("draft_worker", compatibility.KINDS["draft_worker"], found)
    assert row(lines, "trees") == ["yes", "yes"]
    assert row(lines, "confidence") == ["–", "yes"]
    assert row(lines, "`TreesByOption`") == ["–", "yes"]
    assert row(lines, "conformance") == ["3 passed, 1 skipped", "not recorded"]


def test_none_means_what_the_contract_says(compatibility: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend(AttentionBackend):
        contract: ClassVar[tuple[int, int]] = (1, 0)
        capabilities = AttentionCapabilities(dtypes=frozenset({"float32", "bfloat16"}))

    class Few(Backend):
        capabilities = replace(Backend.capabilities, head_sizes=frozenset({64, 128}))

    monkeypatch.setattr(compatibility, "bundled", lambda kind: {"mine": Backend, "few": Few})
    lines = compatibility.section("attention_backend", compatibility.KINDS["attention_backend"], {})
    assert row(lines, "dtypes") == ["`bfloat16`, `float32`"] * 2
    assert row(lines, "head_sizes") == ["any", "`128`, `64`"]
    assert row(lines, "kv_dtypes") == ["only the queries' own"] * 2


def test_long_sets_have_a_table_of_their_members(compatibility: ModuleType) -> None:
    shared = compatibility.members("forms", {"one": frozenset("abc"), "two": frozenset("bcd")})
    assert row(shared, "`a`") == ["yes", "–"]
    assert row(shared, "`d`") == ["–", "yes"]
    apart = compatibility.members("forms", {"one": frozenset("ab"), "two": frozenset("c"), "three": frozenset()})
    assert [row(apart, name) for name in ("one", "two", "three")] == [["`a`, `b`"], ["`c`"], ["–"]]


def test_a_bar_in_a_value_does_not_end_its_cell(compatibility: ModuleType) -> None:
    assert compatibility.cell(("<|eot|>\n",)) == r"`<\|eot\|>`"


def test_an_old_page_is_noticed(
    compatibility: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compatibility, "page", lambda: "what the plugins declare now")
    old = tmp_path / "compatibility.md"
    old.write_text("what they declared once")
    monkeypatch.setattr(sys, "argv", ["compatibility.py", "--check", str(old)])
    assert compatibility.main() == 1
    assert "run make docs" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["compatibility.py", "--write", str(old)])
    assert compatibility.main() == 0
    monkeypatch.setattr(sys, "argv", ["compatibility.py", "--check", str(old)])
    assert compatibility.main() == 0
