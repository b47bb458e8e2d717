"""A tiny random Llama and its Hugging Face twin, for engine tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM
from dovetail.testing.tiny_models import save_tiny_model, tiny_config


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(directory, transformers model): 2 layers, vocabulary of 128, no tokenizer."""
    directory = tmp_path_factory.mktemp("tiny-llama")
    model = save_tiny_model(directory, tiny_config("llama", max_position_embeddings=512))
    return directory, model


@pytest.fixture
def make_llm(tiny_llama: tuple[Path, Any]) -> Iterator[Callable[..., LLM]]:
    """`LLM` over the tiny Llama in float32; sections given as keywords are merged over small defaults."""
    created: list[LLM] = []

    def make(**sections: Any) -> LLM:
        defaults: dict[str, dict[str, Any]] = {
            "model": {"path": str(tiny_llama[0]), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 256},
            "cache": {"block_size": 4, "num_blocks": 400},
            "executor": {"threads": 1},
        }
        merged: dict[str, Any] = dict(defaults)
        for name, section in sections.items():
            merged[name] = defaults.get(name, {}) | section if isinstance(section, dict) else section
        llm = LLM(**merged)
        created.append(llm)
        return llm

    yield make
    for llm in created:
        llm.shutdown()


@pytest.fixture(scope="session")
def hf_greedy(tiny_llama: tuple[Path, Any]) -> Callable[[list[int], int], list[int]]:
    """The tokens that transformers' `generate` gives, greedy."""
    import torch

    model = tiny_llama[1]
    cache: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        key = (tuple(prompt), num_tokens)
        if key not in cache:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
            )
            cache[key] = out[0, len(prompt) :].tolist()
        return cache[key]

    return generate
