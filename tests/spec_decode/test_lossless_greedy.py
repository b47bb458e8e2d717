"""Greedy float32 text with every bundled drafter equals plain decoding, token for token: alone and 16 at a time.

A small version of benchmarks/losslessness.py, which runs 200 prompts of 128 tokens on the default model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
OPENINGS = [
    "Once upon a time, {} found a",
    "{} went to the park with",
    "One day {} was very sad. The",
    "{} liked to play",
]
NAMES = ["Lily", "a big dog", "the old king", "a small boat"]
PROMPTS = [opening.format(name) for name in NAMES for opening in OPENINGS]
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"name": "ngram", "num_tokens": 4, "length": "fixed"},
    "suffix": {"name": "suffix", "num_tokens": 8, "length": "fixed", "max_spec_factor": 2.0},
    "suffix-tree": {"name": "suffix", "num_tokens": 8, "length": "fixed", "max_spec_factor": 4.0, "tree": True},
    "recycling": {"name": "recycling", "num_tokens": 12, "length": "fixed"},
    "recycling-chain": {"name": "recycling", "num_tokens": 4, "length": "fixed", "tree": False},
    "lookahead": {"name": "lookahead", "num_tokens": 13, "length": "fixed", "window": 4, "candidates": 3},
    "medusa": {"name": "medusa", "num_tokens": 3, "length": "fixed"},
    "medusa-tree": {
        "name": "medusa",
        "num_tokens": 6,
        "length": "fixed",
        "tree": [[0], [1], [2], [0, 0], [0, 1], [0, 0, 0]],
    },
    "eagle": {"name": "eagle", "num_tokens": 3, "length": "fixed"},
    "self_speculation": {"name": "self_speculation", "num_tokens": 3, "length": "fixed"},
    "eagle-tree": {"name": "eagle", "num_tokens": 6, "length": "fixed", "top_k": 2, "depth": 3},
    "draft_model": {"name": "draft_model", "num_tokens": 4, "length": "fixed"},
    "draft_model-shared_tokens": {
        "name": "draft_model",
        "num_tokens": 4,
        "length": "fixed",
        "vocabulary": "shared_tokens",
    },
}


def create(max_num_seqs: int, paths: dict[str, Path]) -> LLM:
    """One target with all drafters."""
    drafters = {
        label: section | ({"path": str(paths.get(label, paths[section["name"]]))} if section["name"] in paths else {})
        for label, section in DRAFTERS.items()
    }
    # All layers but the last: fewer of a model that was not trained for it guess nothing.
    num_layers = json.loads((paths["target"] / "config.json").read_text())["num_hidden_layers"]
    drafters["self_speculation"] |= {"exit_layer": num_layers - 1}
    return LLM(
        model={"path": str(paths["target"]), "dtype": "float32"},
        cache={"memory_gib": 0.3},
        executor={"threads": 1},
        scheduler={"max_num_seqs": max_num_seqs},
        speculative={"drafters": drafters, "default": None},
    )


@pytest.fixture(scope="module", params=[1, 16])
def target(
    request: pytest.FixtureRequest, trained_paths: dict[str, Path]
) -> Iterator[tuple[LLM, list[str], list[list[int]]]]:
    """The engine, its prompts, and its plain answers."""
    prompts = PROMPTS[:: 4 if request.param == 1 else 1]
    with create(request.param, trained_paths) as llm:
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
