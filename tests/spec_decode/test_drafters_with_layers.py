"""Drafters with layers of their own under the suite that third parties run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import DraftModel, DraftModelInfo, SpeculationNeed
from dovetail.plugins.model_families.llama import LlamaFamily
from dovetail.spec_decode.draft_model import DraftModelDrafter
from dovetail.spec_decode.eagle.drafter import EagleDrafter
from dovetail.testing.paged_draft_suite import PagedDraftWorkerSuite
from dovetail.testing.tiny_models import tiny_config, tiny_model

HIDDEN = 32


class TestDraftModel(PagedDraftWorkerSuite):
    plugin = DraftModelDrafter
    options: ClassVar[Mapping[str, Any]] = {"path": "made by the suite"}
    vocab_size = 50

    def need(self) -> SpeculationNeed:
        config = self._config().to_dict()
        size = LlamaFamily(PluginOptions()).size(config)
        return replace(super().need(), model=DraftModelInfo(config, size, "float32"))

    def _config(self) -> Any:
        return tiny_config("llama", vocab_size=self.vocab_size, hidden_size=HIDDEN, architectures=["LlamaForCausalLM"])

    def own_model(self) -> DraftModel:
        config = self._config()
        context = self.create_context()
        module = LlamaFamily(PluginOptions()).create(config.to_dict(), context)
        module.load_weights(tiny_model(config).state_dict().items())
        return DraftModel(module, context.attention_layers, 256)


def write_head(directory: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "fc": (HIDDEN, 2 * HIDDEN),
        "layers.0.self_attn.q_proj": (HIDDEN, HIDDEN),
        "layers.0.self_attn.k_proj": (HIDDEN // 2, HIDDEN),
        "layers.0.self_attn.v_proj": (HIDDEN // 2, HIDDEN),
        "layers.0.self_attn.o_proj": (HIDDEN, HIDDEN),
        "layers.0.mlp.gate_proj": (48, HIDDEN),
        "layers.0.mlp.up_proj": (48, HIDDEN),
        "layers.0.mlp.down_proj": (HIDDEN, 48),
    }
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in shapes.items()
    }
    tensors["layers.0.post_attention_layernorm.weight"] = torch.ones(HIDDEN)
    save_file(tensors, directory / "model.safetensors")
    layer = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"speculators_model_type": "eagle", "transformer_layer_config": layer | {"vocab_size": 50}}
    (directory / "config.json").write_text(json.dumps(config))


class TestEagleChains(PagedDraftWorkerSuite):
    plugin = EagleDrafter
    hidden_size = HIDDEN
    num_draws = 800

    @pytest.fixture(autouse=True)
    def _head(self, tmp_path: Path) -> None:
        write_head(tmp_path)
        self.options = {"path": str(tmp_path)}


class TestEagleTrees(TestEagleChains):
    num_tokens = 7

    @pytest.fixture(autouse=True)
    def _head(self, tmp_path: Path) -> None:
        write_head(tmp_path)
        self.options = {"path": str(tmp_path), "top_k": 2, "depth": 3}
