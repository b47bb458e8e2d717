"""A model family as a third party writes it, over `dovetail.nn.decoder`: Arcee's, which is Llama's but for the MLP.

It needs no packaging: `model: {family: ./examples/arcee.py:ArceeFamily, path: ...}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import CausalLM, ModelCapabilities, ModelContext, ModelFamily, ModelNeed, ModelSize
from dovetail.contracts.plugin import Environment
from dovetail.nn import ColumnLinear, RotaryEmbedding, RowLinear
from dovetail.nn.decoder import AttentionStyle, DecoderModel, self_attention
from dovetail.nn.hf_config import longest_sequence, required, rope_spec
from dovetail.nn.planning import planned_size, reasons_against


class SquaredReluMLP(torch.nn.Module):
    """down(relu(up(x)) ** 2)."""

    def __init__(self, context: ModelContext, name: str, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.up_proj = ColumnLinear(context, f"{name}.up_proj", hidden_size, intermediate_size)
        self.down_proj = RowLinear(context, f"{name}.down_proj", intermediate_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        hidden: torch.Tensor = self.down_proj(torch.relu(self.up_proj(x)).square())
        return hidden


def create(config: Mapping[str, Any], context: ModelContext) -> DecoderModel:
    """The decoder, or a stage of it."""
    if required(config, "architectures")[0] != "ArceeForCausalLM":
        raise ModelError(f"{config['architectures'][0]} is not ArceeForCausalLM")
    style = AttentionStyle(windows=[None] * int(required(config, "num_hidden_layers")))

    def make_mlp(context: ModelContext, layer: str, index: int) -> torch.nn.Module:
        sizes = int(required(config, "hidden_size")), int(required(config, "intermediate_size"))
        return SquaredReluMLP(context, f"{layer}.mlp", *sizes)

    return DecoderModel(
        context, config, RotaryEmbedding(context, rope_spec(config)), self_attention(config, style), make_mlp
    )


class ArceeFamily(ModelFamily):
    """Arcee's foundation models."""

    contract = (1, 4)
    architectures = ("ArceeForCausalLM",)
    capabilities = ModelCapabilities(
        tensor_parallel=None,
        quantization=True,
        operators=True,
        batch_invariant=True,
        hidden_layers=True,
        adapters=True,
        stages=True,
    )

    @classmethod
    def check(cls, need: ModelNeed, options: Any, environment: Environment) -> list[str]:
        """Builds the model on the meta device and reports what that meets."""
        return reasons_against(create, need)

    def size(self, config: Mapping[str, Any]) -> ModelSize:
        """Counted from the module's own blocks."""
        return planned_size(create, config, longest_sequence(rope_spec(config)))

    def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM:
        """Builds the decoder."""
        return create(config, context)
