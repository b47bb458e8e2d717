"""The decoder that Llama, Mistral, Qwen and their mixtures of experts share: pre-norm blocks with rotary attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import cast

import torch

from dovetail.contracts.model import ModelContext
from dovetail.nn.attention import Attention
from dovetail.nn.hf_config import Config, head_size, num_kv_heads, required
from dovetail.nn.linear import QKVLinear, RowLinear
from dovetail.nn.loading import WeightRules
from dovetail.nn.norm import OffsetRMSNorm, RMSNorm
from dovetail.nn.rope import Rotation
from dovetail.nn.stages import StagedCausalLM


@dataclass(frozen=True, kw_only=True)
class AttentionStyle:
    """Options of the attention in which these models differ."""

    windows: Sequence[int | None]
    """Sliding window of each layer."""
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: type[RMSNorm] | type[OffsetRMSNorm] | None = None
    """Norm over each query and key head before the rotation (Qwen3, Gemma 3); None: no norm."""
    scale: float | None = None
    """Factor of the dot products; None: head_size ** -0.5."""
    soft_cap: float | None = None


MakeMLP = Callable[[ModelContext, str, int], torch.nn.Module]
"""Makes the block after the attention, from the context, the layer's dotted name and its number."""
MakeAttention = Callable[[ModelContext, str, int], torch.nn.Module]
"""Makes the attention, from the context, the block's dotted name and the layer's number."""


class SelfAttention(torch.nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, context: ModelContext, config: Config, style: AttentionStyle, name: str, window: int | None):
        super().__init__()
        hidden_size, size = int(required(config, "hidden_size")), head_size(config)
        num_heads = int(required(config, "num_attention_heads"))
        self.qkv_proj = QKVLinear(
            context,
            f"{name}.qkv_proj",
            hidden_size,
            num_heads,
            num_kv_heads(config),
            size,
            (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"),
            style.qkv_bias,
        )
        self.o_proj = RowLinear(context, f"{name}.o_proj", num_heads * size, hidden_size, style.output_bias)
        self.q_norm: torch.nn.Module | None = None
        self.k_norm: torch.nn.Module | None = None
        if style.head_norm is not None:
            eps = float(required(config, "rms_norm_eps"))
            self.q_norm = style.head_norm(context, f"{name}.q_norm", size, eps)
            self.k_norm = style.head_norm(context, f"{name}.k_norm", size, eps)
        self._heads, self._kv_heads, self._head_size = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, size
        scale = size**-0.5 if style.scale is None else style.scale
        self.attention = Attention(context, self._heads, self._kv_heads, size, scale, window, style.soft_cap)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self._head_size)
        num_rotated = self._heads + self._kv_heads
        queries_keys, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(heads[:, : self._heads]), self.k_norm(heads[:, self._heads : num_rotated])
            queries_keys = torch.cat((query, key), dim=1)
        output: torch.Tensor = self.o_proj(self.attention.rotate_and_forward(queries_keys, value, rotation))
        return output


def self_attention(config: Config, style: AttentionStyle) -> MakeAttention:
    """Returns a function that makes the attention of any layer, in one style."""

    def make(context: ModelContext, name: str, index: int) -> torch.nn.Module:
        return SelfAttention(context, config, style, name, style.windows[index])

    return make


class DecoderLayer(torch.nn.Module):
    """Computes x + attention(norm(x)), then x + mlp(norm(x)); the norm that follows a sum computes it."""

    def __init__(
        self,
        context: ModelContext,
        config: Config,
        make_attention: MakeAttention,
        make_mlp: MakeMLP,
        name: str,
        index: int,
    ):
        super().__init__()
        hidden_size, eps = int(required(config, "hidden_size")), float(required(config, "rms_norm_eps"))
        self.input_layernorm = RMSNorm(context, f"{name}.input_layernorm", hidden_size, eps)
        self.self_attn = make_attention(context, f"{name}.self_attn", index)
        self.post_attention_layernorm = RMSNorm(context, f"{name}.post_attention_layernorm", hidden_size, eps)
        self.mlp = make_mlp(context, name, index)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (x, residual), whose sum is the layer's output. The input is residual + x (residual None: x alone),
        both [T, hidden_size]; both may be overwritten."""
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.post_attention_layernorm.add(self.self_attn(x, rotation), residual)
        return self.mlp(x), residual


class DecoderModel(StagedCausalLM):
    """The whole causal language model, or a stage of it; a `CausalLM`.

    All layers get the rotation that `rotary` makes of the positions. Sizes, the norms' epsilon and whether the output
    layer is tied come from `config`, under Llama's keys.
    """

    gives_hidden_layers = True
    skips_layers = True

    def __init__(
        self,
        context: ModelContext,
        config: Config,
        rotary: torch.nn.Module,
        make_attention: MakeAttention,
        make_mlp: MakeMLP,
        rules: WeightRules | None = None,
    ):
        hidden_size, eps = int(required(config, "hidden_size")), float(required(config, "rms_norm_eps"))

        def make_layer(name: str, index: int) -> torch.nn.Module:
            return DecoderLayer(context, config, make_attention, make_mlp, name, index)

        super().__init__(
            context,
            vocab_size=int(required(config, "vocab_size")),
            hidden_size=hidden_size,
            num_layers=int(required(config, "num_hidden_layers")),
            make_layer=make_layer,
            make_norm=lambda name: RMSNorm(context, name, hidden_size, eps),
            is_tied=bool(config.get("tie_word_embeddings", False)),
            rules=rules,
        )
        self.rotary = rotary

    def run_layers(
        self, x: torch.Tensor, positions: torch.Tensor, wanted: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._run(x, positions, wanted, frozenset())

    def run_other_layers(self, x: torch.Tensor, positions: torch.Tensor, skipped: Set[int]) -> torch.Tensor:
        """As `StagedCausalLM.run_other_layers`."""
        return self._run(x, positions, (), skipped)[0]

    def _run(
        self, x: torch.Tensor, positions: torch.Tensor, wanted: Sequence[int], skipped: Set[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rotation, norm = self.rotary(positions), cast(RMSNorm | None, self.norm)
        residual: torch.Tensor | None = None
        states = []
        for index, layer in zip(self.held_layers, self.layers, strict=True):
            if index in wanted:
                states.append(_sum(x, residual))
            if index not in skipped:
                x, residual = layer(x, residual, rotation)
        if norm is not None and self.num_layers in wanted:
            states.append(_sum(x, residual))
        hidden = _sum(x, residual) if norm is None else norm.add(x, residual)[0]
        return hidden, torch.cat(states, dim=-1) if states else None


def _sum(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Returns a copy in any case: layers overwrite their arguments."""
    return x.clone() if residual is None else residual + x
