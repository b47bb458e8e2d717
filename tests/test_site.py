"""The generated pages of the documentation site; whether links lead somewhere, the strict build itself says."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from dovetail.contracts.kinds import KINDS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def scripts() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def tree(scripts: None) -> ModuleType:
    return importlib.import_module("site_tree")


@pytest.fixture(scope="module")
def pages(scripts: None) -> dict[str, str]:
    made: dict[str, str] = importlib.import_module("site_pages").generated_pages()
    return made


def test_every_kind_has_a_page_with_its_group_and_version(pages: dict[str, str]) -> None:
    for name, kind in KINDS.items():
        module = kind.base.partition(":")[0].rpartition(".")[2]
        page = pages[f"contracts/{module}.md"]
        assert f"`{kind.group}` | {kind.version} |" in page, name
        assert f"::: dovetail.contracts.{module}\n" in page


def test_every_module_of_the_contracts_has_a_page(pages: dict[str, str]) -> None:
    modules = {path.stem for path in (ROOT / "core" / "contracts").glob("*.py")} - {"__init__"}
    assert modules <= {Path(page).stem for page in pages if page.startswith("contracts/")}


@pytest.mark.parametrize(
    ("path", "page"),
    [
        ("README.md", "index.md"),
        ("docs/writing/testing.md", "writing/testing.md"),
        ("core/contracts/kv.py", "contracts/kv.md"),
        ("core/contracts", "contracts/index.md"),
        ("nn/stages.py", "nn/stages.md"),
        ("nn", "nn/index.md"),
        ("schedulers/fcfs.py", "source/schedulers/fcfs.py.md"),
        ("spec_decode/eagle", "source/spec_decode/eagle/index.md"),
    ],
)
def test_where_a_file_stands(tree: ModuleType, path: str, page: str) -> None:
    assert tree.place(path) == page


def test_what_pages_link_to_is_shown_as_it_is(tree: ModuleType, pages: dict[str, str]) -> None:
    listed = [path for path in tree.listings() if (ROOT / path).is_file()]
    assert "schedulers/fcfs.py" in listed
    for path in listed:
        assert (ROOT / path).read_text(encoding="utf-8").rstrip() in pages[tree.place(path)]


def test_links_are_resolved_from_their_page(tree: ModuleType) -> None:
    assert tree.resolve("docs/writing/testing.md", "../plugins.md#kinds") == ("docs/plugins.md", "#kinds")
    assert tree.resolve("docs/writing/testing.md", "#here") == ("docs/writing/testing.md", "#here")
    assert tree.resolve("docs/plugins.md", "../schedulers/fcfs.py") == ("schedulers/fcfs.py", "")
    assert tree.resolve("docs/plugins.md", "https://example.org/") is None
    assert tree.resolve("docs/plugins.md", "../../elsewhere") is None


def test_code_is_no_place_for_links(tree: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tree, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("[a](a.md)\n\n```python\nx[0](b.md)\n```\n\n[c](c.md)\n")
    assert [link.path for link in tree.Page("page.md").links()] == ["a.md", "c.md"]
