"""Llama 4: chunked attention with rotary positions, full attention without, and experts whose inputs are weighted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import CausalLM, ModelCapabilities, ModelFamily, ModelNeed, ModelSize
from dovetail.contracts.plugin import Environment
from dovetail.nn import (
    Attention,
    GatedMLP,
    ModelContext,
    QKVLinear,
    RopeSpec,
    RotaryEmbedding,
    Rotation,
    RowLinear,
    SparseMoE,
    SparseShape,
    WeightRules,
    halves_from_pairs,
)
from dovetail.nn.decoder import DecoderModel
from dovetail.nn.hf_config import Config, head_size, longest_sequence, num_kv_heads, required, rope_spec
from dovetail.nn.moe import ExpertNames
from dovetail.nn.planning import planned_size, reasons_against
from dovetail.plugins.model_families.wrappers import TEXT_NAMES, text_model


class Llama4Family(ModelFamily):
    """Llama 4, of the models for images the text."""

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
    architectures = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")

    @classmethod
    def check(cls, need: ModelNeed, options: Any, environment: Environment) -> list[str]:
        """Builds the model on the meta device and reports what that meets."""
        return reasons_against(create, need)

    def size(self, config: Mapping[str, Any]) -> ModelSize:
        """Counted from the module's own blocks."""
        config = text_model(config)
        return planned_size(create, config, longest_sequence(_rope(config)))

    def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM:
        """Builds the decoder for config's architecture."""
        return create(config, context)


def create(config: Mapping[str, Any], context: ModelContext) -> DecoderModel:
    """The module for one of `Llama4Family.architectures`."""
    config = text_model(config)
    if required(config, "architectures")[0] not in Llama4Family.architectures:
        raise ModelError(f"{config['architectures'][0]} is none of {', '.join(Llama4Family.architectures)}")
    num_layers = int(required(config, "num_hidden_layers"))
    every = int(config.get("interleave_moe_layer_step") or 1)
    sparse_layers = config.get("moe_layers")
    sparse_layers = range(every - 1, num_layers, every) if sparse_layers is None else sparse_layers
    is_rotated, chunks = _rotated_layers(config, num_layers), _chunks(config, num_layers)
    sparse = _sparse_shape(config)

    def make_attention(context: ModelContext, name: str, index: int) -> torch.nn.Module:
        return Llama4Attention(context, config, name, is_rotated[index], chunks[index])

    def make_mlp(context: ModelContext, layer: str, index: int) -> torch.nn.Module:
        name = f"{layer}.feed_forward"
        if index in sparse_layers:
            return SparseMoE(context, name, sparse, ExpertNames(router="router"))
        return GatedMLP(
            context, name, sparse.hidden_size, int(required(config, "intermediate_size_mlp")), sparse.hidden_act
        )

    return DecoderModel(context, config, Positions(context, config), make_attention, make_mlp, _rules(config))


def _rope(config: Config) -> RopeSpec:
    return rope_spec(config, theta=5e5)


def _rotated_layers(config: Config, num_layers: int) -> Sequence[bool]:
    """Despite the key's name, 1 in no_rope_layers means a layer with rotary positions."""
    given = config.get("no_rope_layers")
    if given and len(given) != num_layers:
        raise ModelError(f"no_rope_layers names {len(given)} layers, num_hidden_layers is {num_layers}")
    every = int(config.get("no_rope_layer_interval") or 4)
    return [bool(one) for one in given] if given else [(index + 1) % every != 0 for index in range(num_layers)]


def _chunks(config: Config, num_layers: int) -> Sequence[int | None]:
    """The chunk of each layer, None for full attention; layers without rotary positions see everything."""
    rotated = _rotated_layers(config, num_layers)
    types = config.get("layer_types") or ["chunked_attention" if one else "full_attention" for one in rotated]
    if len(types) != num_layers:
        raise ModelError(f"layer_types names {len(types)} layers, num_hidden_layers is {num_layers}")
    unknown = sorted(set(types) - {"full_attention", "chunked_attention"})
    if unknown:
        raise ModelError(f"layers of type {', '.join(unknown)} are not known here")
    chunk = config.get("attention_chunk_size")
    if "chunked_attention" in types and not (isinstance(chunk, int) and chunk > 0):
        raise ModelError(f"layers of type chunked_attention need attention_chunk_size, a number above 0, got {chunk!r}")
    return [chunk if kind == "chunked_attention" else None for kind in types]


def _sparse_shape(config: Config) -> SparseShape:
    size = int(required(config, "intermediate_size"))
    return SparseShape(
        hidden_size=int(required(config, "hidden_size")),
        intermediate_size=size,
        num_experts=int(required(config, "num_local_experts")),
        top_k=int(required(config, "num_experts_per_tok")),
        normalize=False,
        hidden_act=config.get("hidden_act", "silu"),
        shared_intermediate_size=size,
        has_sigmoid=True,
        weighs_inputs=True,
        shared_gate=False,
    )


@dataclass(frozen=True)
class Turn:
    """What layers make of the positions of one step."""

    rotation: Rotation
    temperature: torch.Tensor | None
    """float32 [T, 1, 1]: factor on the queries of layers without rotary positions."""


class Positions(torch.nn.Module):
    """Rotations, and the temperatures that sharpen attention over long texts (Nakanishi 2025, Scalable-Softmax)."""

    def __init__(self, context: ModelContext, config: Config):
        super().__init__()
        self.rotary = RotaryEmbedding(context, _rope(config))
        self._temperatures: torch.Tensor | None = None
        if config.get("attn_temperature_tuning", True):
            floor, strength = float(config.get("floor_scale", 8192)), float(config.get("attn_scale", 0.1))
            if floor <= 0:
                raise ModelError(f"floor_scale must be a number above 0, got {floor}")
            counts = torch.arange(1, context.max_model_len + 1, dtype=torch.float32)
            temperatures = torch.log1p(torch.floor(counts / floor)) * strength + 1.0
            self._temperatures = temperatures.view(-1, 1, 1).to(context.device)

    def forward(self, positions: torch.Tensor) -> Turn:
        """int64 [T] -> what the layers need."""
        temperatures = self._temperatures
        return Turn(self.rotary(positions), None if temperatures is None else temperatures[positions])


class Llama4Attention(torch.nn.Module):
    """Attention with rotary positions, queries and keys of length 1; or without positions."""

    def __init__(self, context: ModelContext, config: Config, name: str, is_rotated: bool, chunk: int | None):
        super().__init__()
        hidden_size, size = int(required(config, "hidden_size")), head_size(config)
        num_heads, bias = int(required(config, "num_attention_heads")), bool(config.get("attention_bias", False))
        names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        self.qkv_proj = QKVLinear(
            context, f"{name}.qkv_proj", hidden_size, num_heads, num_kv_heads(config), size, names, bias
        )
        self.o_proj = RowLinear(context, f"{name}.o_proj", num_heads * size, hidden_size, bias)
        self._heads, self._kv_heads, self._head_size = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, size
        self._is_rotated = is_rotated
        self._ones = context.empty(size).fill_(1.0) if is_rotated and config.get("use_qk_norm", True) else None
        self._eps = float(required(config, "rms_norm_eps"))
        self._operators = context.operators
        self.attention = Attention(context, self._heads, self._kv_heads, size, size**-0.5, chunk=chunk)

    def forward(self, x: torch.Tensor, turn: Turn) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        heads = self.qkv_proj(x).view(x.shape[0], -1, self._head_size)
        num_rotated = self._heads + self._kv_heads
        queries_keys, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if self._is_rotated:
            if self._ones is not None:
                # The paper's order is rotation, norm; a rotation changes no length, so that both give the same.
                queries_keys = self._operators.rms_norm(queries_keys, self._ones, self._eps)
            attended = self.attention.rotate_and_forward(queries_keys, value, turn.rotation)
        else:
            query, key = queries_keys[:, : self._heads], queries_keys[:, self._heads :]
            if turn.temperature is not None:
                query = (query * turn.temperature).to(x.dtype)
            attended = self.attention(query.contiguous(), key.contiguous(), value.contiguous())
        output: torch.Tensor = self.o_proj(attended)
        return output


def _rules(config: Config) -> WeightRules:
    """Checkpoints stack the experts, inputs first, and pair neighbouring elements of a head for the rotation."""
    size = head_size(config)

    def split_gate_up(match: re.Match[str], tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for index, both in enumerate(tensor):
            for name, part in zip(("gate_proj", "up_proj"), both.chunk(2, dim=1), strict=True):
                yield f"{match[1]}.{index}.{name}.weight", part.t().contiguous()

    def split_down(match: re.Match[str], tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for index, down in enumerate(tensor):
            yield f"{match[1]}.{index}.down_proj.weight", down.t().contiguous()

    def reorder(match: re.Match[str], tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if len(tensor) % size:
            raise ModelError(f"{match[0]} has {len(tensor)} rows, and a head has {size}")
        return [(match[0], halves_from_pairs(tensor, size, size))]

    return WeightRules(
        renamed=TEXT_NAMES,
        expanded=(
            (r"(.*\.feed_forward\.experts)\.gate_up_proj", split_gate_up),
            (r"(.*\.feed_forward\.experts)\.down_proj", split_down),
            (r".*\.self_attn\.[qk]_proj\.(weight|bias)", reorder),
        ),
    )
