"""Falcon, StableLM, GPT-J, Bloom and MPT: decoders with LayerNorm, of which each goes its own way in little things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from dovetail.contracts.model import CausalLM, ModelCapabilities, ModelFamily, ModelNeed, ModelSize
from dovetail.contracts.plugin import Environment
from dovetail.nn import (
    Attention,
    GatedMLP,
    LayerNorm,
    ModelContext,
    PlainMLP,
    QKVLinear,
    RotaryEmbedding,
    Rotation,
    RowLinear,
)
from dovetail.nn.hf_config import required
from dovetail.nn.planning import planned_size, reasons_against
from dovetail.nn.stages import StagedCausalLM
from dovetail.plugins.model_families.layernorm_styles import Style, style_of


class LayerNormFamily(ModelFamily):
    """Decoders with LayerNorm, with rotary positions or ALiBi."""

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
    architectures = (
        "BloomForCausalLM",
        "FalconForCausalLM",
        "GPTJForCausalLM",
        "MptForCausalLM",
        "StableLmForCausalLM",
    )

    @classmethod
    def check(cls, need: ModelNeed, options: Any, environment: Environment) -> list[str]:
        """Builds the model on the meta device and reports what that meets."""
        return reasons_against(create, need)

    def size(self, config: Mapping[str, Any]) -> ModelSize:
        """Counted from the module's own blocks."""
        style = style_of(config)
        return planned_size(create, config, style.max_model_len)

    def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM:
        """Builds the decoder for config's architecture."""
        return create(config, context)


def create(config: Mapping[str, Any], context: ModelContext) -> LayerNormModel:
    """The module for one of `LayerNormFamily.architectures`."""
    return LayerNormModel(context, int(required(config, "vocab_size")), style_of(config))


class LayerNormAttention(torch.nn.Module):
    """Attention with rotary positions or ALiBi."""

    def __init__(self, context: ModelContext, style: Style, name: str):
        super().__init__()
        size = style.head_size
        self.qkv_proj = QKVLinear(
            context,
            f"{name}.qkv_proj",
            style.hidden_size,
            style.num_heads,
            style.num_kv_heads,
            size,
            (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"),
            style.qkv_bias,
        )
        self.o_proj = RowLinear(context, f"{name}.o_proj", style.hidden_size, style.hidden_size, style.output_bias)
        self._heads, self._kv_heads, self._head_size = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, size
        first = context.tp_rank * self._heads
        slopes = None if style.slopes is None else style.slopes[first : first + self._heads]
        scale = size**-0.5 if style.scale is None else style.scale
        self.attention = Attention(context, self._heads, self._kv_heads, size, scale, alibi_slopes=slopes)
        self._limit = style.qkv_limit

    def forward(self, x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        qkv = self.qkv_proj(x)
        if self._limit is not None:
            qkv = qkv.clamp(-self._limit, self._limit)
        heads = qkv.view(x.shape[0], -1, self._head_size)
        queries_keys, value = heads.split((self._heads + self._kv_heads, self._kv_heads), dim=1)
        if rotation is None:
            query, key = queries_keys.split((self._heads, self._kv_heads), dim=1)
            attended = self.attention(query, key, value)
        else:
            attended = self.attention.rotate_and_forward(queries_keys, value, rotation)
        output: torch.Tensor = self.o_proj(attended)
        return output


class LayerNormLayer(torch.nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)), side by side or one after the other."""

    def __init__(self, context: ModelContext, style: Style, name: str):
        super().__init__()
        hidden_size, bias = style.hidden_size, style.norm_bias
        self.input_layernorm = LayerNorm(context, f"{name}.input_layernorm", hidden_size, style.eps, bias)
        self.self_attn = LayerNormAttention(context, style, f"{name}.self_attn")
        self.post_attention_layernorm: LayerNorm | None = None
        if style.has_second_norm:
            second = f"{name}.post_attention_layernorm"
            self.post_attention_layernorm = LayerNorm(context, second, hidden_size, style.eps, bias)
        mlp = GatedMLP if style.is_gated else PlainMLP
        self.mlp = mlp(context, f"{name}.mlp", hidden_size, style.intermediate_size, style.hidden_act, style.mlp_bias)
        self._is_parallel = style.is_parallel

    def forward(self, x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        normed = self.input_layernorm(x)
        after = x + self.self_attn(normed, rotation)
        if self.post_attention_layernorm is not None:
            normed = self.post_attention_layernorm(x if self._is_parallel else after)
        output: torch.Tensor = after + self.mlp(normed)
        return output


class LayerNormModel(StagedCausalLM):
    """The whole causal language model, or a stage of it; a `CausalLM`."""

    def __init__(self, context: ModelContext, vocab_size: int, style: Style):
        hidden_size = style.hidden_size
        super().__init__(
            context,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_layers=style.num_layers,
            make_layer=lambda name, _: LayerNormLayer(context, style, name),
            make_norm=lambda name: LayerNorm(context, name, hidden_size, style.eps, style.norm_bias),
            is_tied=style.is_tied,
            head_bias=style.head_bias,
            rules=style.rules,
        )
        self.embed_norm: LayerNorm | None = None
        if style.has_embedding_norm and context.is_first_stage:
            self.embed_norm = LayerNorm(context, "model.embed_norm", hidden_size, style.eps)
        self.rotary = RotaryEmbedding(context, style.rope) if style.rope is not None else None

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """As `CausalLM.embed`: normed, where the model norms them."""
        x = super().embed(input_ids)
        return x if self.embed_norm is None else self.embed_norm(x)

    def run_layers(
        self, x: torch.Tensor, positions: torch.Tensor, wanted: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `StagedCausalLM.run_layers`; no states between layers."""
        rotation = None if self.rotary is None else self.rotary(positions)
        for layer in self.layers:
            x = layer(x, rotation)
        return x if self.norm is None else self.norm(x), None
