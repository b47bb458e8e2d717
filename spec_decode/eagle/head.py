"""The modules of EAGLE heads, built of `dovetail.nn` and run over paged keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path

import torch

from dovetail.nn import (
    Attention,
    ColumnLinear,
    GatedMLP,
    LMHead,
    ModelContext,
    QKVLinear,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    RowLinear,
    VocabEmbedding,
    load_weights,
)
from dovetail.nn.hf_config import Config, head_size, num_kv_heads, required, rope_spec
from dovetail.spec_decode.eagle.files import HeadConfig, read_tensors, tensor_names


class HeadAttention(torch.nn.Module):
    """Grouped-query attention with rotary positions, over inputs of any width."""

    def __init__(self, context: ModelContext, config: Config, name: str, in_size: int):
        super().__init__()
        size, num_heads = head_size(config), int(required(config, "num_attention_heads"))
        bias = bool(config.get("attention_bias", False))
        names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        self.qkv_proj = QKVLinear(
            context, f"{name}.qkv_proj", in_size, num_heads, num_kv_heads(config), size, names, bias
        )
        self.o_proj = RowLinear(context, f"{name}.o_proj", num_heads * size, int(config["hidden_size"]), bias)
        self._heads, self._kv_heads, self._head_size = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, size
        self.attention = Attention(context, self._heads, self._kv_heads, size, size**-0.5)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[T, in_size] -> [T, hidden_size]."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self._head_size)
        num_rotated = self._heads + self._kv_heads
        mixed = self.attention.rotate_and_forward(heads[:, :num_rotated], heads[:, num_rotated:], rotation)
        output: torch.Tensor = self.o_proj(mixed)
        return output


class HeadLayer(torch.nn.Module):
    """A decoder layer of Llama's kind. The first one of EAGLE-1 has no norm before its attention; the first one of
    EAGLE-3 attends to norm(embedding) and norm(feature) side by side."""

    def __init__(self, context: ModelContext, head: HeadConfig, index: int, *, has_norm: bool):
        super().__init__()
        config, name = head.layer, f"layers.{index}"
        eps = float(config.get("rms_norm_eps") or 1e-6)
        self._takes_embeds = head.version == 3 and index == 0
        self._norm_before_residual = head.norm_before_residual
        self.input_layernorm = RMSNorm(context, f"{name}.input_layernorm", head.hidden_size, eps) if has_norm else None
        self.hidden_norm = (
            RMSNorm(context, f"{name}.hidden_norm", head.hidden_size, eps) if self._takes_embeds else None
        )
        in_size = 2 * head.hidden_size if self._takes_embeds else head.hidden_size
        self.self_attn = HeadAttention(context, config, f"{name}.self_attn", in_size)
        self.post_attention_layernorm = RMSNorm(context, f"{name}.post_attention_layernorm", head.hidden_size, eps)
        sizes = head.hidden_size, int(required(config, "intermediate_size"))
        bias = bool(config.get("mlp_bias", False))
        self.mlp = GatedMLP(context, f"{name}.mlp", *sizes, str(config.get("hidden_act", "silu")), bias)

    def forward(self, x: torch.Tensor, embeds: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Both [T, hidden_size] -> [T, hidden_size]."""
        residual = x
        normed = x if self.input_layernorm is None else self.input_layernorm(embeds if self._takes_embeds else x)
        if self.hidden_norm is not None:
            hidden = self.hidden_norm(x)
            residual = hidden if self._norm_before_residual else x
            normed = torch.cat((normed, hidden), dim=-1)
        x = residual + self.self_attn(normed, rotation)
        output: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class EagleHead(torch.nn.Module):
    """A head of either version: from the next token's embedding and a feature to the next feature and its logits.

    EAGLE-1 (Li et al. 2024, arXiv 2401.15077): x = fc(embedding, feature), and the output is the target's next last
    state as guessed. EAGLE-3 (Li et al. 2025, arXiv 2503.01840): features of several layers come in through fc once;
    from then on the head's own states are its features.
    """

    def __init__(self, context: ModelContext, head: HeadConfig, names: Set[str]):
        super().__init__()
        self.config = head
        hidden, eps = head.hidden_size, float(head.layer.get("rms_norm_eps") or 1e-6)
        num_states = len(head.hidden_layers or ()) if head.version == 3 else 0
        in_size = num_states * head.target_hidden_size if head.version == 3 else hidden + head.target_hidden_size
        self.fc = ColumnLinear(context, "fc", in_size, hidden, "fc.bias" in names)
        self.rotary = RotaryEmbedding(context, rope_spec(head.layer))
        self.layers = torch.nn.ModuleList(
            HeadLayer(context, head, index, has_norm=f"layers.{index}.input_layernorm.weight" in names)
            for index in range(head.num_layers)
        )

        def optional_norm(name: str) -> RMSNorm | None:
            return RMSNorm(context, name, hidden, eps) if f"{name}.weight" in names else None

        self.norm = optional_norm("norm")
        self.embedding_layernorm = optional_norm("embedding_layernorm")
        self.pre_lm_head_layernorm = optional_norm("pre_lm_head_layernorm")
        self.embed_tokens = (
            VocabEmbedding(context, "embed_tokens", head.vocab_size, hidden) if "embed_tokens.weight" in names else None
        )
        self.lm_head = LMHead(context, "lm_head", head.draft_vocab_size, hidden) if "lm_head.weight" in names else None
        self._device = context.device
        self.target_ids: torch.Tensor | None = None
        """int64 [draft_vocab_size]: the target's id of each draft token; None: the same."""

    def load(self, directory: Path) -> None:
        """Reads the weights. Raises `ModelError` that lists tensors that are missing, too many or of another shape."""
        load_weights(self, self._without_map(directory))

    def _without_map(self, directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in read_tensors(directory):
            if name == "d2t":
                ids = torch.arange(len(tensor)) + tensor.to(torch.int64)
                self.target_ids = ids.to(self._device) if bool((tensor != 0).any()) else None
            else:
                yield name, tensor

    def first_features(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [N, ...] as features [N, hidden_size]."""
        features: torch.Tensor = self.fc(states) if self.config.version == 3 else states
        return features

    def forward(
        self, embeds: torch.Tensor, features: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of the tokens at positions + 1, features at `positions` (int64 [T]) -> the next features, and the
        same ready for the unembedding, all [T, hidden_size]."""
        if self.embedding_layernorm is not None:
            embeds = self.embedding_layernorm(embeds)
        x = features if self.config.version == 3 else self.fc(torch.cat((embeds, features), dim=-1))
        rotation = self.rotary(positions)
        for layer in self.layers:
            x = layer(x, embeds, rotation)
        output = x
        for norm in (self.norm, self.pre_lm_head_layernorm):
            output = output if norm is None else norm(output)
        return x, output


def load_head(context: ModelContext, head: HeadConfig, directory: Path) -> EagleHead:
    """The head of a folder, with its weights."""
    module = EagleHead(context, head, tensor_names(directory))
    module.load(directory)
    return module
