"""What config.json says of a GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.contracts.errors import ModelError
from dovetail.nn.hf_config import required


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model, and how it scales its attention."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    eps: float
    activation: str
    is_tied: bool
    scales_by_size: bool
    """Whether dot products are divided by the root of the head's size."""
    scales_by_layer: bool
    """Whether they are divided by the number of the layer as well, counted from 1 (Mistral's GPT-2s)."""

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.hidden_size // self.num_heads

    def scale(self, layer: int) -> float:
        """Factor of the dot products in layer number `layer`, counted from 0."""
        scale = self.head_size**-0.5 if self.scales_by_size else 1.0
        return scale / (layer + 1) if self.scales_by_layer else scale


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape of a GPT-2. Raises `ModelError` for another architecture, and for what is not served."""
    architecture = required(config, "architectures")[0]
    if architecture != "GPT2LMHeadModel":
        raise ModelError(f"{architecture} is not GPT2LMHeadModel")
    if config.get("add_cross_attention"):
        raise ModelError("add_cross_attention is not served: it reads the states of an encoder, and there is none")
    hidden_size = int(required(config, "n_embd", "hidden_size"))
    num_heads = int(required(config, "n_head", "num_attention_heads"))
    if hidden_size % num_heads:
        raise ModelError(f"the hidden size {hidden_size} does not divide by {num_heads} heads")
    return Shape(
        vocab_size=int(required(config, "vocab_size")),
        hidden_size=hidden_size,
        intermediate_size=int(config.get("n_inner") or 4 * hidden_size),
        num_layers=int(required(config, "n_layer", "num_hidden_layers")),
        num_heads=num_heads,
        num_positions=int(required(config, "n_positions", "max_position_embeddings")),
        eps=float(config.get("layer_norm_epsilon", 1e-5)),
        activation=str(config.get("activation_function") or "gelu_new"),
        is_tied=bool(config.get("tie_word_embeddings", True)),
        scales_by_size=bool(config.get("scale_attn_weights", True)),
        scales_by_layer=bool(config.get("scale_attn_by_inverse_layer_idx", False)),
    )
