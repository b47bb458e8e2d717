"""Mixtral, Qwen2-MoE and Qwen3-MoE: the Llama decoder with sparse mixtures of experts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import CausalLM, ModelCapabilities, ModelFamily, ModelNeed, ModelSize
from dovetail.contracts.plugin import Environment
from dovetail.nn import GatedMLP, ModelContext, RMSNorm, RopeSpec, RotaryEmbedding, SparseMoE, SparseShape, WeightRules
from dovetail.nn.decoder import AttentionStyle, DecoderModel, self_attention
from dovetail.nn.hf_config import Config, check_layer_types, layer_windows, longest_sequence, required, rope_spec
from dovetail.nn.planning import planned_size, reasons_against


class MoEFamily(ModelFamily):
    """Decoders whose feed-forward blocks are mixtures of experts."""

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
    architectures = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")

    @classmethod
    def check(cls, need: ModelNeed, options: Any, environment: Environment) -> list[str]:
        """Builds the model on the meta device and reports what that meets."""
        return reasons_against(create, need)

    def size(self, config: Mapping[str, Any]) -> ModelSize:
        """Counted from the module's own blocks."""
        return planned_size(create, config, longest_sequence(_rope(config)))

    def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM:
        """Builds the decoder for config's architecture."""
        return create(config, context)


def create(config: Mapping[str, Any], context: ModelContext) -> DecoderModel:
    """The module for one of `MoEFamily.architectures`."""
    sparse = _sparse_shape(config)

    def make_mlp(context: ModelContext, layer: str, index: int) -> torch.nn.Module:
        if _is_sparse(config, index):
            return SparseMoE(context, f"{layer}.mlp", sparse)
        return GatedMLP(
            context, f"{layer}.mlp", sparse.hidden_size, required(config, "intermediate_size"), sparse.hidden_act
        )

    attention = self_attention(config, _style(config))
    return DecoderModel(context, config, RotaryEmbedding(context, _rope(config)), attention, make_mlp, RULES)


def _style(config: Config) -> AttentionStyle:
    check_layer_types(config)
    architecture = required(config, "architectures")[0]
    num_layers = int(required(config, "num_hidden_layers"))
    window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
    match architecture:
        case "MixtralForCausalLM":
            return AttentionStyle(windows=[config.get("sliding_window")] * num_layers)
        case "Qwen2MoeForCausalLM":
            bias = bool(config.get("qkv_bias", True))
            return AttentionStyle(windows=_qwen2_windows(config) if window else [None] * num_layers, qkv_bias=bias)
        case "Qwen3MoeForCausalLM":
            bias = bool(config.get("attention_bias", False))
            return AttentionStyle(windows=[window] * num_layers, qkv_bias=bias, output_bias=bias, head_norm=RMSNorm)
    raise ModelError(f"{architecture} is none of {', '.join(MoEFamily.architectures)}")


def _rope(config: Config) -> RopeSpec:
    return rope_spec(config, theta=1e6 if config.get("model_type") == "mixtral" else 1e4)


def _qwen2_windows(config: Config) -> list[int | None]:
    """Every second of the first max_window_layers layers slides."""
    last = int(config.get("max_window_layers", 28))
    types = [
        "sliding_attention" if index % 2 == 0 and index < last else "full_attention"
        for index in range(int(required(config, "num_hidden_layers")))
    ]
    return layer_windows(config, types)


def _sparse_shape(config: Config) -> SparseShape:
    is_mixtral = required(config, "architectures")[0] == "MixtralForCausalLM"
    return SparseShape(
        hidden_size=int(required(config, "hidden_size")),
        intermediate_size=int(required(config, "intermediate_size" if is_mixtral else "moe_intermediate_size")),
        num_experts=int(required(config, "num_experts", "num_local_experts")),
        top_k=int(required(config, "num_experts_per_tok")),
        normalize=is_mixtral or bool(config.get("norm_topk_prob", False)),
        hidden_act=config.get("hidden_act", "silu"),
        shared_intermediate_size=int(config.get("shared_expert_intermediate_size") or 0),
    )


def _is_sparse(config: Config, index: int) -> bool:
    """Mixtral has experts in every layer; Qwen in every decoder_sparse_step-th one that mlp_only_layers spares."""
    return (
        index not in (config.get("mlp_only_layers") or ()) and (index + 1) % config.get("decoder_sparse_step", 1) == 0
    )


def _split_gate_up(match: re.Match[str], tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """[num_experts, 2 * intermediate, hidden]: gates above, ups below."""
    for index, both in enumerate(tensor):
        gate, up = both.chunk(2)
        yield f"{match[1]}.{index}.gate_proj.weight", gate
        yield f"{match[1]}.{index}.up_proj.weight", up


def _split_down(match: re.Match[str], tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """[num_experts, hidden, intermediate]."""
    for index, down in enumerate(tensor):
        yield f"{match[1]}.{index}.down_proj.weight", down


RULES = WeightRules(
    renamed=(
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
    ),
    expanded=(
        (r"(.*\.mlp\.experts)\.gate_up_proj", _split_gate_up),
        (r"(.*\.mlp\.experts)\.down_proj", _split_down),
    ),
)
"""Mixtral's own names, and the layout that transformers 5 holds in memory, to one tensor per expert and matrix."""
