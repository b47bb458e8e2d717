"""Gemma 2 and the text models of Gemma 3: norms before and after each block, alternating windows, soft caps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import CausalLM, ModelCapabilities, ModelFamily, ModelNeed, ModelSize
from dovetail.contracts.plugin import Environment
from dovetail.nn import (
    GatedMLP,
    ModelContext,
    OffsetRMSNorm,
    RopeSpec,
    RotaryEmbedding,
    Rotation,
    WeightRules,
)
from dovetail.nn.decoder import AttentionStyle, SelfAttention
from dovetail.nn.hf_config import Config, layer_windows, required, rope_spec
from dovetail.nn.planning import planned_size, reasons_against
from dovetail.nn.stages import StagedCausalLM
from dovetail.plugins.model_families.wrappers import TEXT_NAMES, text_model


class GemmaFamily(ModelFamily):
    """Gemma 2 and 3, of models for images the text."""

    contract = (1, 4)
    capabilities = ModelCapabilities(
        tensor_parallel=None,
        quantization=True,
        operators=True,
        batch_invariant=True,
        graph_capture=True,
        adapters=True,
        stages=True,
    )
    stability = "provisional"
    preference: ClassVar[int] = 10
    architectures = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

    @classmethod
    def check(cls, need: ModelNeed, options: Any, environment: Environment) -> list[str]:
        """Builds the model on the meta device and reports what that meets."""
        return reasons_against(create, need)

    def size(self, config: Mapping[str, Any]) -> ModelSize:
        """Counted from the module's own blocks. max_position_embeddings includes the scaling here."""
        config = text_model(config)
        return planned_size(create, config, int(required(config, "max_position_embeddings")))

    def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM:
        """Builds the decoder for config's architecture."""
        return create(config, context)


@dataclass(frozen=True)
class GemmaStyle:
    """Where the generations differ."""

    attention: AttentionStyle
    full_rope: RopeSpec
    sliding_rope: RopeSpec
    logits_soft_cap: float | None


def create(config: Mapping[str, Any], context: ModelContext) -> GemmaModel:
    """The module for one of `GemmaFamily.architectures`."""
    config = text_model(config)
    if config.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention makes an encoder of the model, which cannot generate")
    return GemmaModel(context, config, _style(config))


def _style(config: Config) -> GemmaStyle:
    architecture = required(config, "architectures")[0]
    bias = bool(config.get("attention_bias", False))
    scale = float(config.get("query_pre_attn_scalar", 256)) ** -0.5
    attention = AttentionStyle(windows=(), qkv_bias=bias, output_bias=bias, scale=scale)
    if architecture == "Gemma2ForCausalLM":
        rope = rope_spec(config)
        cap = config.get("attn_logit_softcapping", 50.0)
        attention = replace(attention, windows=_windows(config, period=2), soft_cap=cap)
        return GemmaStyle(attention, rope, rope, config.get("final_logit_softcapping", 30.0))
    if architecture == "Gemma3ForCausalLM":
        period = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
        attention = replace(attention, windows=_windows(config, int(period)), head_norm=OffsetRMSNorm)
        full_rope = rope_spec(config, "full_attention", theta=1e6)
        return GemmaStyle(attention, full_rope, _sliding_rope(config), config.get("final_logit_softcapping"))
    raise ModelError(f"{architecture} is none of {', '.join(GemmaFamily.architectures)}")


def _windows(config: Config, period: int) -> list[int | None]:
    """Every `period`-th layer sees everything, the others slide."""
    types = [
        "sliding_attention" if (index + 1) % period else "full_attention"
        for index in range(int(required(config, "num_hidden_layers")))
    ]
    return layer_windows(config, types)


def _sliding_rope(config: Config) -> RopeSpec:
    """Windows keep the short base and are never scaled, unless the config nests parameters by layer type."""
    if "sliding_attention" in (config.get("rope_parameters") or {}):
        return rope_spec(config, "sliding_attention", theta=1e4)
    local = {**config, "rope_parameters": None, "rope_scaling": None, "rope_theta": config.get("rope_local_base_freq")}
    return rope_spec(local, theta=1e4)


class GemmaLayer(torch.nn.Module):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, context: ModelContext, config: Config, style: GemmaStyle, name: str, index: int):
        super().__init__()
        hidden_size, eps = int(required(config, "hidden_size")), float(required(config, "rms_norm_eps"))
        hidden_act = config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"
        intermediate_size = int(required(config, "intermediate_size"))
        window = style.attention.windows[index]
        self.is_sliding = window is not None
        self.input_layernorm = OffsetRMSNorm(context, f"{name}.input_layernorm", hidden_size, eps)
        self.self_attn = SelfAttention(context, config, style.attention, f"{name}.self_attn", window)
        self.post_attention_layernorm = OffsetRMSNorm(context, f"{name}.post_attention_layernorm", hidden_size, eps)
        self.pre_feedforward_layernorm = OffsetRMSNorm(context, f"{name}.pre_feedforward_layernorm", hidden_size, eps)
        self.mlp = GatedMLP(context, f"{name}.mlp", hidden_size, intermediate_size, hidden_act)
        self.post_feedforward_layernorm = OffsetRMSNorm(context, f"{name}.post_feedforward_layernorm", hidden_size, eps)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotation))
        output: torch.Tensor = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return output


class GemmaModel(StagedCausalLM):
    """The whole causal language model, or a stage of it; a `CausalLM`."""

    def __init__(self, context: ModelContext, config: Config, style: GemmaStyle):
        hidden_size, eps = int(required(config, "hidden_size")), float(required(config, "rms_norm_eps"))
        super().__init__(
            context,
            vocab_size=int(required(config, "vocab_size")),
            hidden_size=hidden_size,
            num_layers=len(style.attention.windows),
            make_layer=lambda name, index: GemmaLayer(context, config, style, name, index),
            make_norm=lambda name: OffsetRMSNorm(context, name, hidden_size, eps),
            is_tied=bool(config.get("tie_word_embeddings", True)),
            rules=WeightRules(renamed=TEXT_NAMES),
        )
        # Rounded to the model's dtype, as in training: 55.4256 becomes 55.5 in bfloat16.
        self._embedding_scale = torch.tensor(hidden_size**0.5, dtype=context.dtype).item()
        self.full_rotary = RotaryEmbedding(context, style.full_rope)
        self.sliding_rotary = RotaryEmbedding(context, style.sliding_rope)
        self._logits_soft_cap = style.logits_soft_cap

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """As `CausalLM.embed`: scaled."""
        return super().embed(input_ids) * self._embedding_scale

    def run_layers(
        self, x: torch.Tensor, positions: torch.Tensor, wanted: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `StagedCausalLM.run_layers`; no states between layers."""
        full, sliding = self.full_rotary(positions), self.sliding_rotary(positions)
        for layer in self.layers:
            x = layer(x, sliding if layer.is_sliding else full)
        return x if self.norm is None else self.norm(x), None

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `CausalLM.compute_logits`: capped, where the config caps them."""
        logits = super().compute_logits(hidden)
        if self._logits_soft_cap is None:
            return logits
        return torch.tanh(logits / self._logits_soft_cap) * self._logits_soft_cap
