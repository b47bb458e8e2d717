"""A tiny random Llama over a vocabulary of bytes, with two ends of sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM
from dovetail.testing.grammar_cases import byte_vocabulary
from dovetail.testing.tiny_models import save_tiny_model, tiny_config


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token i < 256 is byte i; the ends are two of the tokens behind them."""
    directory = tmp_path_factory.mktemp("byte-model")
    vocabulary = byte_vocabulary()
    ends = list(vocabulary.end_ids)
    config = tiny_config(
        "llama", vocab_size=vocabulary.vocab_size, eos_token_id=ends, max_position_embeddings=512, num_hidden_layers=1
    )
    save_tiny_model(directory, config)
    (directory / "tokenizer.json").write_text(vocabulary.tokenizer_json)
    return directory


@pytest.fixture
def byte_llm(byte_model: Path) -> Iterator[Callable[..., LLM]]:
    """`LLM` over it in float32; sections are merged over small defaults."""
    created: list[LLM] = []

    def make(**sections: Any) -> LLM:
        defaults: dict[str, dict[str, Any]] = {
            "model": {"path": str(byte_model), "dtype": "float32", "max_model_len": 256},
            "cache": {"block_size": 4, "num_blocks": 400},
            "executor": {"threads": 1},
        }
        merged: dict[str, Any] = dict(defaults)
        for name, section in sections.items():
            merged[name] = defaults.get(name, {}) | section if isinstance(section, dict) else section
        created.append(LLM(**merged))
        return created[-1]

    yield make
    for llm in created:
        llm.shutdown()
