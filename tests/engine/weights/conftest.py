"""Engines over a tiny Llama whose weights are replaced by those of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dovetail import LLM, SamplingParams
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [40, 41, 42]]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of two models of one shape."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(("old", "new"), 1):
        save_tiny_model(folder / name, tiny_config("llama"), seed=seed)
    return {name: folder / name for name in ("old", "new")}


@pytest.fixture(scope="session")
def new_weights(checkpoints: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """The new model's tensors by name."""
    return load_file(checkpoints["new"] / "model.safetensors")


@pytest.fixture
def make(make_llm: Callable[..., LLM], checkpoints: Mapping[str, Path]) -> Callable[..., LLM]:
    """An engine with one of the checkpoints that takes weights in process, unless told otherwise."""

    def create(which: str = "old", **sections: Any) -> LLM:
        model = {"path": str(checkpoints[which]), **sections.pop("model", {})}
        return make_llm(model=model, **{"weight_transport": "in_process", **sections})

    return create


def told(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[Any]:
    """Tokens and the log probabilities of each, per prompt."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(one.outputs[0].token_ids, logprobs_of(one.outputs[0])) for one in outputs]


def logprobs_of(completion: Any) -> list[float]:
    """Of the tokens that were drawn."""
    found = zip(completion.token_ids, completion.logprobs or [], strict=True)
    return [position[token].logprob for token, position in found]


def send(llm: LLM, weights: Mapping[str, torch.Tensor], num_buckets: int = 3, **options: Any) -> Any:
    """One update in process."""
    llm.init_weight_transfer_engine()
    llm.start_weight_update(**options)
    names = list(weights)
    for index in range(num_buckets):
        llm.update_weights({"weights": {name: weights[name] for name in names[index::num_buckets]}})
    return llm.finish_weight_update()
