"""What starts is what explain accepts: families that spell their sizes differently, drafters, executors."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dovetail import LLM, SamplingParams
from dovetail.commands.main import main
from dovetail.config.load import load_config
from dovetail.contracts.errors import ConfigError, ModelError
from dovetail.engine.explanation import explain
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 96},
}
EXECUTORS: dict[str, Any] = {
    "cpu": {"name": "cpu", "threads": 1},
    "gpu": {"name": "gpu", "device": "null"},
    "multiproc": {"name": "multiproc", "threads": 1},
    "two ranks": {"name": "multiproc", "threads": 1, "tensor_parallel": 2},
}
HIDDEN, VOCAB = 64, 128
"""Of every family's model."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("families")
    for family, sizes in FAMILIES.items():
        save_tiny_model(directory / family, tiny_config(family, **sizes))
    write_medusa(directory / "medusa")
    for version in (1, 3):
        write_eagle(directory / f"eagle{version}", version)
    return directory


def write_medusa(directory: Path) -> None:
    directory.mkdir()
    save_file({f"{k}.0.weight": torch.rand(VOCAB, HIDDEN) for k in range(2)}, directory / "medusa_lm_head.safetensors")
    (directory / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 0}))


def write_eagle(directory: Path, version: int) -> None:
    """EAGLE-3 has an unembedding of its own, EAGLE takes the target's."""
    directory.mkdir()
    width = 2 * HIDDEN if version == 3 else HIDDEN
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN if version == 3 else 2 * HIDDEN),
        "layers.0.self_attn.q_proj": (HIDDEN, width),
        "layers.0.self_attn.k_proj": (HIDDEN // 2, width),
        "layers.0.self_attn.v_proj": (HIDDEN // 2, width),
        "layers.0.self_attn.o_proj": (HIDDEN, HIDDEN),
        "layers.0.mlp.gate_proj": (96, HIDDEN),
        "layers.0.mlp.up_proj": (96, HIDDEN),
        "layers.0.mlp.down_proj": (HIDDEN, 96),
    } | ({"embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)} if version == 3 else {})
    norms = ["layers.0.post_attention_layernorm"]
    if version == 3:
        norms += ["layers.0.hidden_norm", "layers.0.input_layernorm", "norm"]
    tensors = {f"{name}.weight": torch.rand(shape) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    save_file(tensors, directory / "model.safetensors")
    layer = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    kind = "eagle3" if version == 3 else "eagle"
    config = {"speculators_model_type": kind, "transformer_layer_config": layer | {"vocab_size": VOCAB}}
    (directory / "config.json").write_text(json.dumps(config))


def drafters(model: Path) -> dict[str, Any]:
    asked = {
        "ngram": {"name": "ngram"},
        "suffix": {"name": "suffix"},
        "medusa": {"name": "medusa", "path": str(model.parent / "medusa")},
        "eagle": {"name": "eagle", "path": str(model.parent / "eagle1")},
        "eagle3": {"name": "eagle", "path": str(model.parent / "eagle3")},
        "model": {"name": "draft_model", "path": str(model)},
    }
    return {name: drafter | {"num_tokens": 2, "length": "fixed"} for name, drafter in asked.items()}


def config(model: Path, executor: str) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 64},
        "cache": {"block_size": 4, "num_blocks": 100},
        "executor": EXECUTORS[executor],
        "speculative": {"drafters": drafters(model), "default": None},
    }


def refused_drafters(family: str) -> set[str]:
    """Those that take states between the target's layers, which transformers' models do not give."""
    return set() if family == "llama" else {"eagle3"}


# A process starts slowly, and transformers' models do not split.
PAIRS: list[Any] = [(family, executor) for family in FAMILIES for executor in ("cpu", "gpu")]
PAIRS += [("llama", "multiproc")]
PAIRS += [pytest.param(*pair, marks=pytest.mark.nightly) for pair in (("gpt2", "multiproc"), ("llama", "two ranks"))]


@pytest.mark.parametrize(("family", "executor"), PAIRS)
def test_drafters_run_where_explain_accepts_them_and_are_refused_where_not(
    models: Path, family: str, executor: str
) -> None:
    prompt = [5, 6, 7, 8] * 3
    asked = config(models / family, executor)
    accepted: dict[str, Any] = {}
    for name, drafter in drafters(models / family).items():
        asked["speculative"]["drafters"] = {name: drafter}
        refusal = explain(load_config(asked)).refusal
        if refusal is None:
            accepted[name] = drafter
        else:
            with pytest.raises(type(refusal), match=re.escape(str(refusal))):
                LLM(config=asked)
    assert set(drafters(models / family)) - set(accepted) == refused_drafters(family)
    asked["speculative"]["drafters"] = accepted
    with LLM(config=asked) as llm:
        names = [None, *accepted]
        outputs = llm.generate(
            [prompt] * len(names),
            [SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, speculation=name) for name in names],
            use_tqdm=False,
        )
    assert [output.metrics.drafter_error for output in outputs] == [None] * len(names)
    assert outputs[-1].metrics.num_accepted > 0  # by a draft model that is the target
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_a_model_of_transformers_over_two_ranks_is_refused_as_explain_says(models: Path, family: str) -> None:
    asked = config(models / family, "two ranks")
    refusal = explain(load_config(asked)).refusal
    assert refusal is not None
    with pytest.raises(type(refusal), match=re.escape(str(refusal))):
        LLM(config=asked)


def test_an_attention_that_cannot_serve_the_layers_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bloom's config does not say that it has ALiBi, its layers do."""
    save_tiny_model(tmp_path / "bloom", tiny_config("bloom", n_layer=2, n_head=4))
    asked = config(tmp_path / "bloom", "cpu") | {"attention": {"name": "block_sparse", "local_blocks": 4}}
    del asked["speculative"]
    with pytest.raises(ConfigError, match="BlockSparseBackend has no ALiBi bias"):
        LLM(config=asked)
    (tmp_path / "engine.json").write_text(json.dumps(asked))
    monkeypatch.setattr(sys, "argv", ["dovetail", "explain", str(tmp_path / "engine.json")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code
    assert "has no ALiBi bias" in " ".join("".join(capsys.readouterr()).split())


@pytest.mark.parametrize(
    ("name", "said", "built"),
    [
        ("num_layers", 3, 2),
        ("num_kv_heads", 5, 4),
        ("head_size", 9, 16),
        ("hidden_size", 0, 64),
        ("vocab_size", 7, 128),
    ],
)
def test_a_family_that_says_another_size_than_it_builds_is_refused_as_explain_says(
    models: Path, tmp_path: Path, name: str, said: int, built: int
) -> None:
    """A family of a third party, over a config that spells sizes in a way of its own."""
    (tmp_path / "wrong.py").write_text(
        "from dataclasses import replace\n"
        "from dovetail.plugins.model_families.transformers import TransformersFamily\n"
        "class Wrong(TransformersFamily):\n"
        "    def size(self, config):\n"
        f"        return replace(super().size(config), {name}={said})\n"
    )
    asked = config(models / "gpt2", "cpu")
    del asked["speculative"]
    asked["model"]["family"] = f"{tmp_path}/wrong.py:Wrong"
    sentence = f"wrong.py:Wrong says {name} {said}, and builds a model of {built}"
    refusal = explain(load_config(asked)).refusal
    assert sentence in str(refusal)
    with pytest.raises(ModelError, match=re.escape(str(refusal))):
        LLM(config=asked)
