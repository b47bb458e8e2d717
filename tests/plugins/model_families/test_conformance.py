"""The bundled families under the suite that third parties run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dovetail.plugins.model_families.deepseek import DeepseekFamily
from dovetail.plugins.model_families.gemma import GemmaFamily
from dovetail.plugins.model_families.layernorm import LayerNormFamily
from dovetail.plugins.model_families.llama import LlamaFamily
from dovetail.plugins.model_families.llama4 import Llama4Family
from dovetail.plugins.model_families.moe import MoEFamily
from dovetail.plugins.model_families.transformers import TransformersFamily
from dovetail.testing.model_family_suite import FamilyCheckpoint, ModelFamilySuite


class TestLlama(ModelFamilySuite):
    plugin = LlamaFamily


class TestQwen3(ModelFamilySuite):
    plugin = LlamaFamily
    model_type = "qwen3"


class TestGemma2(ModelFamilySuite):
    plugin = GemmaFamily


class TestGemma3(ModelFamilySuite):
    plugin = GemmaFamily
    model_type = "gemma3_text"


class TestLlama4(ModelFamilySuite):
    plugin = Llama4Family
    model_type = "llama4_text"


class TestDeepseek(ModelFamilySuite):
    plugin = DeepseekFamily
    model_type = "deepseek_v3"

    def create_checkpoint(self, directory: Path, is_tied: bool) -> FamilyCheckpoint:
        """transformers does not count the routers' biases, which it holds as buffers."""
        checkpoint = super().create_checkpoint(directory, is_tied)
        biases = [one for name, one in checkpoint.weights.items() if name.endswith("e_score_correction_bias")]
        return replace(checkpoint, num_parameters=checkpoint.num_parameters + sum(map(len, biases)))


class TestMixtral(ModelFamilySuite):
    plugin = MoEFamily


class TestQwen2MoE(ModelFamilySuite):
    plugin = MoEFamily
    model_type = "qwen2_moe"


class TestFalcon(ModelFamilySuite):
    plugin = LayerNormFamily
    model_type = "falcon"


class TestBloom(ModelFamilySuite):
    plugin = LayerNormFamily
    model_type = "bloom"
    overrides = {"n_layer": 3, "n_head": 4}  # noqa: RUF012
    needs_operators = False


class TestMPT(ModelFamilySuite):
    plugin = LayerNormFamily
    model_type = "mpt"
    overrides = {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}  # noqa: RUF012
    needs_operators = False


class TestGPTJ(ModelFamilySuite):
    plugin = LayerNormFamily
    model_type = "gptj"
    overrides = {"rotary_dim": 8}  # noqa: RUF012


class TestStableLM(ModelFamilySuite):
    plugin = LayerNormFamily
    model_type = "stablelm"


class TestTransformers(ModelFamilySuite):
    plugin = TransformersFamily
    model_type = "gpt2"
    overrides = {"num_key_value_heads": 4}  # noqa: RUF012

    def embeddings(self, checkpoint: FamilyCheckpoint, token_ids: Sequence[int]) -> torch.Tensor:
        return checkpoint.weights["transformer.wte.weight"][torch.tensor(token_ids)]
