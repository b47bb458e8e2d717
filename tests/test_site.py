"""The generated pages of the documentation site; whether links lead somewhere, the strict build itself says."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from dovetail.contracts.kinds import KINDS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tree(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("site_tree")


@pytest.fixture(scope="module")
def site_pages(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("site_pages")


@pytest.fixture(scope="module")
def pages(site_pages: ModuleType) -> dict[str, str]:
    made: dict[str, str] = site_pages.generated_pages()
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
        ("examples/plugins", "examples/index.md"),
        ("examples/plugins/dovetail-gpt2", "examples/dovetail-gpt2.md"),
        ("examples/plugins/dovetail-gpt2/pyproject.toml", "source/examples/plugins/dovetail-gpt2/pyproject.toml.md"),
        ("docs/surface/dovetail.nn.pyi", "source/docs/surface/dovetail.nn.pyi.md"),
    ],
)
def test_where_a_file_stands(tree: ModuleType, path: str, page: str) -> None:
    assert tree.place(path) == page


def test_what_pages_link_to_is_shown_as_it_is(tree: ModuleType, pages: dict[str, str]) -> None:
    listed = [path for path in tree.listings() if (ROOT / path).is_file()]
    assert "schedulers/fcfs.py" in listed
    for path in listed:
        assert (ROOT / path).read_text(encoding="utf-8").rstrip() in pages[tree.place(path)]


def test_an_example_can_be_read_to_its_last_file(
    tree: ModuleType, site_pages: ModuleType, pages: dict[str, str]
) -> None:
    """The wheel has no examples: the site is where its users find them."""
    folder = ROOT / "examples" / "plugins" / "dovetail-gpt2"
    listed = site_pages.files_of_example("examples/plugins/dovetail-gpt2/README.md")
    for file in [folder / "pyproject.toml", *folder.rglob("*.py")]:
        name = file.relative_to(folder).as_posix()
        assert f"[{name}]({name})" in listed
        assert tree.place(file.relative_to(ROOT).as_posix()) in pages


def test_listings_of_folders_link_to_pages_that_there_are(tree: ModuleType, pages: dict[str, str]) -> None:
    """The surface is a folder of docs/ that the site leaves out."""
    for page in ("source/docs/surface/index.md", "source/plugins/server/index.md"):
        linked = [match["target"] for match in tree.LINK.finditer(pages[page])]
        assert {posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) for target in linked} <= set(pages)


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
