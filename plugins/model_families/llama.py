"""Llama 2 and 3, SmolLM2, Mistral, Phi-3 and 4, Qwen2 to 3: one decoder, with and without biases, windows and norms.

The text of models for images whose text model is one of these is served too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import CausalLM, ModelCapabilities, ModelFamily, ModelNeed, ModelSize
from dovetail.contracts.plugin import Environment
from dovetail.nn import GatedMLP, ModelContext, RMSNorm, RotaryEmbedding, WeightRules
from dovetail.nn.decoder import AttentionStyle, DecoderModel, self_attention
from dovetail.nn.hf_config import (
    Config,
    check_layer_types,
    head_size,
    layer_windows,
    longest_sequence,
    num_kv_heads,
    required,
    rope_spec,
)
from dovetail.nn.planning import planned_size, reasons_against
from dovetail.plugins.model_families.wrappers import TEXT_NAMES, text_model


class LlamaFamily(ModelFamily):
    """Dense decoders in the manner of Llama."""

    contract = (1, 4)
    capabilities = ModelCapabilities(
        tensor_parallel=None,
        quantization=True,
        operators=True,
        batch_invariant=True,
        hidden_layers=True,
        skips_layers=True,
        graph_capture=True,
        adapters=True,
        stages=True,
    )
    stability = "provisional"
    preference: ClassVar[int] = 10
    architectures = (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "LlavaForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
    )

    @classmethod
    def check(cls, need: ModelNeed, options: Any, environment: Environment) -> list[str]:
        """Builds the model on the meta device and reports what that meets."""
        return reasons_against(create, need)

    def size(self, config: Mapping[str, Any]) -> ModelSize:
        """Counted from the module's own blocks."""
        config = text_model(config)
        return planned_size(create, config, longest_sequence(rope_spec(config)))

    def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM:
        """Builds the decoder for config's architecture."""
        return create(config, context)


def create(config: Mapping[str, Any], context: ModelContext) -> DecoderModel:
    """The module for one of `LlamaFamily.architectures`."""
    config = text_model(config)

    def make_mlp(context: ModelContext, layer: str, index: int) -> torch.nn.Module:
        sizes = int(required(config, "hidden_size")), int(required(config, "intermediate_size"))
        bias = bool(config.get("mlp_bias", False))
        return GatedMLP(context, f"{layer}.mlp", *sizes, config.get("hidden_act", "silu"), bias)

    is_phi = required(config, "architectures")[0] == "Phi3ForCausalLM"
    rules = _split_rules(config) if is_phi else WeightRules(renamed=TEXT_NAMES)
    attention = self_attention(config, _style(config))
    return DecoderModel(context, config, RotaryEmbedding(context, rope_spec(config)), attention, make_mlp, rules)


def _split_rules(config: Config) -> WeightRules:
    """Phi-3's checkpoints keep fused projections, whose parts the layers take one by one."""
    size, heads = head_size(config), int(required(config, "num_attention_heads"))
    parts = {
        "qkv_proj": (("q_proj", "k_proj", "v_proj"), [heads * size, *[num_kv_heads(config) * size] * 2]),
        "gate_up_proj": (("gate_proj", "up_proj"), [int(required(config, "intermediate_size"))] * 2),
    }

    def split(match: re.Match[str], tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        names, sizes = parts[match[2]]
        if len(tensor) != sum(sizes):
            raise ModelError(f"{match[0]} has {len(tensor)} rows, the config implies {sum(sizes)}")
        pieces = torch.split_with_sizes(tensor, sizes)
        return [(f"{match[1]}{name}{match[3]}", part) for name, part in zip(names, pieces, strict=True)]

    return WeightRules(expanded=((r"(.*\.)(qkv_proj|gate_up_proj)(\.weight)", split),))


def _style(config: Config) -> AttentionStyle:
    check_layer_types(config)
    architecture = required(config, "architectures")[0]
    bias = bool(config.get("attention_bias", False))
    num_layers = int(required(config, "num_hidden_layers"))
    match architecture:
        case "LlamaForCausalLM":
            return AttentionStyle(windows=[None] * num_layers, qkv_bias=bias, output_bias=bias)
        case "MistralForCausalLM" | "Phi3ForCausalLM":
            return AttentionStyle(windows=[config.get("sliding_window")] * num_layers)
        case "Qwen2ForCausalLM":
            return AttentionStyle(windows=_qwen_windows(config), qkv_bias=True)
        case "Qwen3ForCausalLM":
            return AttentionStyle(windows=_qwen_windows(config), qkv_bias=bias, output_bias=bias, head_norm=RMSNorm)
    raise ModelError(f"{architecture} is none of {', '.join(LlamaFamily.architectures)}")


def _qwen_windows(config: Config) -> list[int | None]:
    """Layers from max_window_layers on slide, where the config wants windows at all."""
    num_layers = int(required(config, "num_hidden_layers"))
    if not config.get("use_sliding_window", False):
        return [None] * num_layers
    first = int(config.get("max_window_layers", 28))
    types = ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]
    return layer_windows(config, types)
