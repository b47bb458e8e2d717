"""The suite of model families, with transformers' GPT-2 as the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from dovetail_gpt2.family import GPT2Family

from dovetail.testing import ModelFamilySuite
from dovetail.testing.model_family_suite import FamilyCheckpoint


class TestGPT2(ModelFamilySuite):
    plugin = GPT2Family

    def embeddings(self, checkpoint: FamilyCheckpoint, token_ids: Sequence[int]) -> torch.Tensor:
        """Without the positions, which the oracle adds before its first layer."""
        return checkpoint.weights["transformer.wte.weight"][torch.tensor(list(token_ids))]


class TestScaledByLayer(TestGPT2):
    """Mistral's GPT-2s: another size of the feed-forward block, another activation, another scale in each layer."""

    overrides: ClassVar = {"n_inner": 96, "activation_function": "relu", "scale_attn_by_inverse_layer_idx": True}


@pytest.mark.slow
class TestUnscaled(TestGPT2):
    overrides: ClassVar = {"scale_attn_weights": False, "n_layer": 3}
