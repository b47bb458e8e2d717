"""GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners") over paged attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dovetail.contracts.model import ModelContext
from dovetail.nn import Attention, LayerNorm, PlainMLP, QKVLinear, RowLinear, WeightHolder
from dovetail.nn.stages import StagedCausalLM
from dovetail_gpt2.checkpoint import weight_rules
from dovetail_gpt2.shape import Shape


class LearnedPositions(WeightHolder):
    """A vector for each position, added to the token's embedding. Every rank has all of them."""

    def __init__(self, context: ModelContext, name: str, num_positions: int, hidden_size: int):
        super().__init__()
        self.weight = context.empty(num_positions, hidden_size)
        self._name = f"{name}.weight"
        self._shape = (num_positions, hidden_size)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 [T], each less than the number of positions -> [T, hidden_size]."""
        return torch.nn.functional.embedding(positions, self.weight)

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """The table."""
        return {self._name: self._shape}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Keeps all of it."""
        self.weight.copy_(tensor)


class GPT2Attention(torch.nn.Module):
    """Attention of as many key heads as query heads, without rotation."""

    def __init__(self, context: ModelContext, shape: Shape, name: str, index: int):
        super().__init__()
        size, num_heads, head_size = shape.hidden_size, shape.num_heads, shape.head_size
        names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        self.qkv_proj = QKVLinear(context, f"{name}.qkv_proj", size, num_heads, num_heads, head_size, names, bias=True)
        self.o_proj = RowLinear(context, f"{name}.o_proj", size, size, bias=True)
        heads = self.qkv_proj.num_heads
        self.attention = Attention(context, heads, heads, head_size, shape.scale(index))
        self._head_size = head_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        query, key, value = self.qkv_proj(x).view(x.shape[0], -1, self._head_size).chunk(3, dim=1)
        output: torch.Tensor = self.o_proj(self.attention(query, key, value))
        return output


class GPT2Layer(torch.nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, context: ModelContext, shape: Shape, name: str, index: int):
        super().__init__()
        size = shape.hidden_size
        self.ln_1 = LayerNorm(context, f"{name}.ln_1", size, shape.eps)
        self.attn = GPT2Attention(context, shape, f"{name}.attn", index)
        self.ln_2 = LayerNorm(context, f"{name}.ln_2", size, shape.eps)
        self.mlp = PlainMLP(context, f"{name}.mlp", size, shape.intermediate_size, shape.activation, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        x = x + self.attn(self.ln_1(x))
        output: torch.Tensor = x + self.mlp(self.ln_2(x))
        return output


class GPT2Model(StagedCausalLM):
    """The whole model, or a stage of it; a `CausalLM`. `embed` gives tokens alone: the layers add positions."""

    gives_hidden_layers = True

    def __init__(self, context: ModelContext, shape: Shape):
        super().__init__(
            context,
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            make_layer=lambda name, index: GPT2Layer(context, shape, name, index),
            make_norm=lambda name: LayerNorm(context, name, shape.hidden_size, shape.eps),
            is_tied=shape.is_tied,
            rules=weight_rules(has_positions=context.is_first_stage),
        )
        self.embed_positions: LearnedPositions | None = None
        if context.is_first_stage:
            table = LearnedPositions(context, "model.embed_positions", shape.num_positions, shape.hidden_size)
            self.embed_positions = table

    def run_layers(
        self, x: torch.Tensor, positions: torch.Tensor, wanted: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `StagedCausalLM.run_layers`."""
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions)
        states = []
        for index, layer in zip(self.held_layers, self.layers, strict=True):
            if index in wanted:
                states.append(x)
            x = layer(x)
        if self.norm is not None:
            if self.num_layers in wanted:
                states.append(x)
            x = self.norm(x)
        return x, torch.cat(states, dim=-1) if states else None
