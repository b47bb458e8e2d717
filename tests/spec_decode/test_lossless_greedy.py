"""Greedy float32 text with every bundled drafter equals plain decoding, token for token: alone and 32 at a time.

A small version of benchmarks/losslessness.py, which runs 200 prompts of 128 tokens on the default model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from dovetail import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
OPENINGS = [
    "Once upon a time, {} found a",
    "{} went to the park with",
    "One day {} was very sad. The",
    "{} liked to play",
]
NAMES = ["Lily", "Tom", "a big dog", "the old king", "Mia", "a small boat", "Max", "Sara"]
PROMPTS = [opening.format(name) for name in NAMES for opening in OPENINGS]
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"name": "ngram", "num_tokens": 4, "length": "fixed"},
    "suffix": {"name": "suffix", "num_tokens": 8, "length": "fixed", "max_spec_factor": 2.0},
    "suffix-tree": {"name": "suffix", "num_tokens": 8, "length": "fixed", "max_spec_factor": 4.0, "tree": True},
    "medusa": {"name": "medusa", "num_tokens": 3, "length": "fixed"},
    "medusa-tree": {
        "name": "medusa",
        "num_tokens": 6,
        "length": "fixed",
        "tree": [[0], [1], [2], [0, 0], [0, 1], [0, 0, 0]],
    },
    "eagle": {"name": "eagle", "num_tokens": 3, "length": "fixed"},
    "eagle-tree": {"name": "eagle", "num_tokens": 6, "length": "fixed", "top_k": 2, "depth": 3},
    "draft_model": {"name": "draft_model", "num_tokens": 4, "length": "fixed"},
}
INNER = 48


def fit_head(target: Path, directory: Path) -> Path:
    """An EAGLE-1 head for the target that guesses a little: `fc` by least squares over the target's own samples, the
    layer behind it small and random."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    size, vocab_size = model.config.hidden_size, model.config.vocab_size
    generator = torch.manual_seed(0)
    with torch.inference_mode():
        tokens = model.generate(torch.ones(32, 1, dtype=torch.int64), do_sample=True, max_new_tokens=64, min_length=64)
        states = model(tokens, output_hidden_states=True).hidden_states[-1]
        seen = torch.cat((model.get_input_embeddings()(tokens[:, 1:]), states[:, :-1]), dim=-1).flatten(0, 1)
        fc = torch.linalg.lstsq(seen, states[:, 1:].flatten(0, 1)).solution.T
    shapes = {f"self_attn.{name}_proj": (size, size) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (INNER, size), "mlp.up_proj": (INNER, size), "mlp.down_proj": (size, INNER)}
    tensors = {
        f"layers.0.{name}.weight": 0.01 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    tensors |= {"fc.weight": fc.contiguous(), "layers.0.post_attention_layernorm.weight": torch.ones(size)}
    save_file(tensors, directory / "model.safetensors")
    heads = model.config.num_attention_heads
    layer = {"hidden_size": size, "intermediate_size": INNER, "num_attention_heads": heads, "vocab_size": vocab_size}
    config = {"speculators_model_type": "eagle", "transformer_layer_config": layer}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def paths(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where the weights of the target and of each drafter are."""
    head = fit_head(trained.target, tmp_path_factory.mktemp("eagle"))
    return {"target": trained.target, "medusa": trained.medusa, "draft_model": trained.draft, "eagle": head}


def create(max_num_seqs: int, paths: dict[str, Path]) -> LLM:
    """One target with all drafters."""
    drafters = {
        label: section | ({"path": str(paths[section["name"]])} if section["name"] in paths else {})
        for label, section in DRAFTERS.items()
    }
    return LLM(
        model={"path": str(paths["target"]), "dtype": "float32"},
        cache={"memory_gib": 0.3},
        executor={"threads": 1},
        scheduler={"max_num_seqs": max_num_seqs},
        speculative={"drafters": drafters, "default": None},
    )


@pytest.fixture(scope="module", params=[1, 32])
def target(request: pytest.FixtureRequest, paths: dict[str, Path]) -> Iterator[tuple[LLM, list[str], list[list[int]]]]:
    """The engine, its prompts, and its plain answers."""
    prompts = PROMPTS[:: 8 if request.param == 1 else 1]
    with create(request.param, paths) as llm:
        plain = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert all(output.metrics.num_drafted == 0 for output in plain)
        yield llm, prompts, [output.outputs[0].token_ids for output in plain]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_of_plain_decoding(target: tuple[LLM, list[str], list[list[int]]], drafter: str) -> None:
    llm, prompts, answers = target
    outputs = llm.generate(prompts, replace(PARAMS, speculation=drafter), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == answers
    assert sum(output.metrics.num_accepted for output in outputs) > 0
    assert all(output.metrics.drafter_error is None for output in outputs)
