"""What the pages under docs/ print works as it stands there, and every page can be found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import dovetail.testing
from dovetail import LLM, SamplingParams, StructuredOutputs
from dovetail.config.load import load_config
from dovetail.contracts.errors import ConfigError
from dovetail.engine.resolving import resolve
from dovetail.engine.resolving.server import resolve_server
from dovetail.testing.chat_models import FAMILIES, save_chat_model

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def printed_files(page: str) -> dict[str, str]:
    """The blocks of a page that begin with a comment that names a file, by this name."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.DOTALL)
    assert len(dict(found)) == len(found), "two blocks of one name"
    return dict(found)


def printed_config(page: str) -> str:
    """The block of a page that names ./mine.py and the class which the page prints."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    names = re.findall(r"^class (\w+)", printed_files(page)["mine.py"], re.MULTILINE)
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (block,) = [block for block in blocks if any(f'"./mine.py:{name}"' in block for name in names)]
    return block


@pytest.mark.parametrize("file", ["docs/writing/testing.md", "testing/quirks.py"])
def test_printed_quirks_are_of_tests_that_there_are(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    printed = re.findall(r"class \w+\((\w+)\):\n\s+plugin = \w+\n\s+quirks = \{\n(.*?)\n\s*\}", text, re.DOTALL)
    assert printed
    for suite, quirks in printed:
        names = re.findall(r'"(test_\w+)(?:\[.*?\])?": Quirk', quirks)
        assert names
        for name in names:
            assert callable(getattr(getattr(dovetail.testing, suite), name, None)), f"{suite} has no {name}"


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A model, and what a page prints: its files, and config.yaml with its config."""
    page = request.param
    for name, source in printed_files(page).items():
        (tmp_path / name).write_text(source)
    save_chat_model(tmp_path / "model", FAMILIES["hermes"])
    model = f"model: {{path: {tmp_path / 'model'}, dtype: float32, max_model_len: 256}}\ncache: {{num_blocks: 100}}\n"
    (tmp_path / "config.yaml").write_text(model + printed_config(page))
    return tmp_path


@pytest.mark.parametrize(
    "page",
    ["telemetry", "grammars", *(pytest.param(page, marks=pytest.mark.nightly) for page in ("routes", "dialects"))],
)
def test_the_printed_plugin_passes_the_printed_test(page: str, tmp_path: Path) -> None:
    """With the whole suite of its kind: no test fails, and none but those of what is not declared is skipped."""
    for name, source in printed_files(page).items():
        (tmp_path / name).write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "test_mine.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for reason in re.findall(r"^SKIPPED .*?: (.*)$", done.stdout, re.MULTILINE):
        assert re.search("does not declare|compiles no grammars of form", reason), reason


@pytest.mark.parametrize("folder", ["grammars"], indirect=True)
def test_the_printed_grammar_keeps_to_the_choices(folder: Path) -> None:
    params = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputs(choice=["red", "blue"]))
    with LLM(config=folder / "config.yaml") as llm:
        outputs = llm.generate(["A colour:"] * 4, params, use_tqdm=False)
    assert {output.outputs[0].text for output in outputs} <= {"red", "blue"}


@pytest.mark.parametrize("folder", ["telemetry"], indirect=True)
def test_the_printed_sink_counts_the_tokens(folder: Path) -> None:
    with LLM(config=folder / "config.yaml") as llm:
        llm.generate(["One"], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
        assert b"\nmy_tokens_total 5\n" in llm.engine.metrics().body


@pytest.mark.parametrize("folder", ["dialects"], indirect=True)
def test_the_printed_config_chooses_the_dialect(folder: Path) -> None:
    assert resolve(load_config(folder / "config.yaml")).dialect.reference == f"{folder}/mine.py:TagDialect"


@pytest.mark.parametrize("folder", ["routes"], indirect=True)
def test_the_printed_config_adds_the_route(folder: Path) -> None:
    routes = resolve_server(load_config(folder / "config.yaml")).routes
    assert routes["tell"].reference == f"{folder}/mine.py:TellRoute"
    assert "completions" in routes


def test_the_printed_scheduler_refuses_what_its_check_names(tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(printed_files("writing/selection")["picky.py"])
    save_chat_model(tmp_path / "model", FAMILIES["hermes"])
    config = {"model": {"path": str(tmp_path / "model"), "dtype": "float32", "max_model_len": 256}}
    scheduler = {"name": f"{tmp_path}/picky.py:Picky", "max_num_seqs": 16}
    assert resolve(load_config(config | {"scheduler": scheduler})).scheduler.options["most"] == 64
    with pytest.raises(ConfigError, match="it serves at most 8 requests at a time"):
        resolve(load_config(config | {"scheduler": scheduler | {"most": 8}}))


def links(page: Path) -> list[tuple[Path, str]]:
    """Targets of a page's links within the repository, with their fragments."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    split = [target.partition("#") for target in targets if not re.match(r"[a-z]+:", target)]
    return [((page.parent / path).resolve() if path else page, fragment) for path, _, fragment in split]


def anchors(page: Path) -> set[str]:
    """Fragments of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, fragment in links(page):
        assert target.exists(), target
        if fragment and target.suffix == ".md":
            assert fragment in anchors(target), f"{target.name}#{fragment}"


def test_every_page_is_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    ahead = [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        seen.add(page)
        ahead += [target for target, _ in links(page) if target in PAGES and target not in seen]
    assert sorted(page.name for page in PAGES if page not in seen) == []
