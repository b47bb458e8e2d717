"""A small random GPT-2, and transformers' own of the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.testing.tiny_models import save_tiny_model, tiny_config


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(directory, transformers model)."""
    directory = tmp_path_factory.mktemp("gpt2")
    return directory, save_tiny_model(directory, tiny_config("gpt2"))


@pytest.fixture(scope="session")
def greedy(saved: tuple[Path, Any]) -> Callable[[Sequence[int], int], list[int]]:
    """Greedy continuation of a prompt by transformers."""

    def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            whole = saved[1].generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
            )
        tokens: list[int] = whole[0, len(prompt) :].tolist()
        return tokens

    return continuation
