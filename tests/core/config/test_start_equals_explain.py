"""What starts is what explain accepts: families that spell their sizes differently, drafters, executors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, SamplingParams
from dovetail.cli.main import main
from dovetail.contracts.errors import ConfigError
from dovetail.testing.tiny_models import read_config, save_tiny_model, tiny_config

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 96},
}
EXECUTORS: dict[str, Any] = {"cpu": {"name": "cpu", "threads": 1}, "gpu": {"name": "gpu", "device": "null"}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("families")
    for family, sizes in FAMILIES.items():
        save_tiny_model(directory / family, tiny_config(family, **sizes))
    return directory


def drafters(model: Path) -> dict[str, Any]:
    return {
        "ngram": {"name": "ngram", "num_tokens": 2, "length": "fixed"},
        "suffix": {"name": "suffix", "num_tokens": 2, "length": "fixed"},
        "model": {"name": "draft_model", "path": str(model), "num_tokens": 2, "length": "fixed"},
    }


def config(model: Path, executor: str) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 64},
        "cache": {"block_size": 4, "num_blocks": 100},
        "executor": EXECUTORS[executor],
        "speculative": {"drafters": drafters(model), "default": None},
    }


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_drafter_runs_over_every_family(models: Path, family: str, executor: str) -> None:
    prompt = [5, 6, 7, 8] * 3
    with LLM(config=config(models / family, executor)) as llm:
        asked = [None, *drafters(models / family)]
        outputs = llm.generate(
            [prompt] * len(asked),
            [SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, speculation=name) for name in asked],
            use_tqdm=False,
        )
    assert [output.metrics.drafter_error for output in outputs] == [None] * len(asked)
    assert outputs[-1].metrics.num_accepted > 0  # by a draft model that is the target
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_a_target_that_does_not_say_its_hidden_size_is_refused_before_weights_are_read(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A family of a third party that fills in nothing, over a config that spells it in a way of its own."""
    assert "hidden_size" not in read_config(models / "gpt2")
    (tmp_path / "quiet.py").write_text(
        "from dataclasses import replace\n"
        "from dovetail.plugins.model_families.transformers import TransformersFamily\n"
        "class Quiet(TransformersFamily):\n"
        "    def size(self, config):\n"
        "        return replace(super().size(config), hidden_size=0)\n"
    )
    asked = config(models / "gpt2", "cpu")
    asked["model"]["family"] = f"{tmp_path}/quiet.py:Quiet"
    with pytest.raises(ConfigError, match="drafters have to know the target's hidden size, and neither Quiet nor"):
        LLM(config=asked)
    (tmp_path / "engine.json").write_text(json.dumps(asked))
    monkeypatch.setattr(sys, "argv", ["dovetail", "explain", str(tmp_path / "engine.json")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code
    assert "hidden size" in "".join(capsys.readouterr())
