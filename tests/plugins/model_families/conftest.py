"""Random checkpoints, each made once, and the harness that runs a family on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.contracts.model import ModelFamily
from dovetail.testing.model_harness import ModelHarness
from dovetail.testing.tiny_models import read_config, read_weights, save_tiny_model, tiny_config


@dataclass(frozen=True)
class Checkpoint:
    """A saved random model, beside the transformers model it came from."""

    directory: Path
    config: dict[str, Any]
    oracle: Any

    def run(self, family_class: type[ModelFamily], **kwargs: Any) -> ModelHarness:
        """The family's model with these weights; `config` among the keywords stands in for config.json, `backend` for
        the reference."""
        config = kwargs.pop("config", self.config)
        weights = kwargs.pop("weights", None) or read_weights(self.directory)
        backend = kwargs.pop("backend", ReferenceBackend)
        return ModelHarness(family_class(family_class.Options()), config, weights, backend, **kwargs)

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """transformers' logits [T, vocab_size]."""
        with torch.no_grad():
            return self.oracle(torch.tensor([token_ids])).logits[0]

    def generate(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """transformers' greedy continuation."""
        ids = torch.tensor([token_ids])
        output = self.oracle.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        return output[0, len(token_ids) :].tolist()


MakeCheckpoint = Callable[..., Checkpoint]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """make_checkpoint("llama", tie_word_embeddings=True, ...): the same arguments give the same checkpoint."""
    made: dict[str, Checkpoint] = {}

    def make(model_type: str, **overrides: Any) -> Checkpoint:
        key = f"{model_type} {sorted(overrides.items())}"
        if key not in made:
            directory = tmp_path_factory.mktemp(model_type)
            oracle = save_tiny_model(directory, tiny_config(model_type, **overrides))
            made[key] = Checkpoint(directory, read_config(directory), oracle)
        return made[key]

    return make


@pytest.fixture
def prompt() -> list[int]:
    """48 token ids below 128: six times the windows of the tiny models."""
    return torch.randint(0, 128, (48,), generator=torch.Generator().manual_seed(1)).tolist()
