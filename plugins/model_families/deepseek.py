"""DeepSeek-V2 and V3: multi-head latent attention, and experts that are chosen group by group."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import (
    FURTHER_MODULE,
    CausalLM,
    ModelCapabilities,
    ModelFamily,
    ModelNeed,
    ModelSize,
    PredictsFurther,
)
from dovetail.contracts.plugin import Environment
from dovetail.nn import (
    ColumnLinear,
    ExpertNames,
    GatedMLP,
    GroupRouting,
    LatentAttention,
    LatentShape,
    Linear,
    LinearPart,
    ModelContext,
    RMSNorm,
    RopeSpec,
    RotaryEmbedding,
    Rotation,
    RowLinear,
    SparseMoE,
    SparseShape,
    WeightRules,
    halves_from_pairs,
)
from dovetail.nn.decoder import DecoderModel, MakeAttention, MakeMLP
from dovetail.nn.hf_config import Config, longest_sequence, required, rope_spec
from dovetail.nn.planning import planned_size, reasons_against
from dovetail.plugins.model_families.moe import RULES

_V2, _V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
_NORM_EPS = 1e-6
"""Of the norms of compressed vectors, whatever rms_norm_eps says."""


class DeepseekFamily(ModelFamily):
    """DeepSeek-V2, V2-Lite, V3, R1, with pages of one latent vector per token and layer."""

    contract = (1, 3)
    capabilities = ModelCapabilities(
        tensor_parallel=None,
        quantization=True,
        operators=True,
        batch_invariant=True,
        hidden_layers=True,
        skips_layers=True,
        graph_capture=True,
        stages=True,
    )
    stability = "provisional"
    preference: ClassVar[int] = 10
    architectures = (_V2, _V3)

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
    """The module for one of `DeepseekFamily.architectures`, or one of its modules for multi-token prediction."""
    if required(config, "architectures")[0] not in DeepseekFamily.architectures:
        raise ModelError(f"{config['architectures'][0]} is none of {', '.join(DeepseekFamily.architectures)}")
    sparse, further = _sparse_shape(config), config.get(FURTHER_MODULE)
    num_layers = int(required(config, "num_hidden_layers"))
    if further is not None and not 0 <= int(further) < _num_further(config):
        raise ModelError(f"{FURTHER_MODULE} is {further}, and the checkpoint has {_num_further(config)} such modules")
    first_sparse, every = int(required(config, "first_k_dense_replace")), int(config.get("moe_layer_freq") or 1)

    def make_attention(context: ModelContext, name: str, index: int) -> torch.nn.Module:
        return DeepseekAttention(context, config, name)

    def make_mlp(context: ModelContext, layer: str, index: int) -> torch.nn.Module:
        name = f"{layer}.mlp"
        index += 0 if further is None else num_layers + int(further)  # its number in the checkpoint
        if index >= first_sparse and index % every == 0:
            return SparseMoE(context, name, sparse, ExpertNames(shared="shared_experts"))
        return GatedMLP(
            context, name, sparse.hidden_size, int(required(config, "intermediate_size")), sparse.hidden_act
        )

    rotary = RotaryEmbedding(context, _rope(config))
    if further is None:
        return DecoderModel(context, config, rotary, make_attention, make_mlp, _rules(config))
    rules = _further_rules(_rules(config), num_layers + int(further))
    return DeepseekFurther(context, {**config, "num_hidden_layers": 1}, rotary, make_attention, make_mlp, rules)


def _num_further(config: Config) -> int:
    return int(config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0)


class DeepseekFurther(DecoderModel, PredictsFurther):
    """A module for multi-token prediction: two norms and a projection before one decoder layer (DeepSeek-V3, section
    2.2). Embedding and output layer are the main model's."""

    def __init__(
        self,
        context: ModelContext,
        config: Config,
        rotary: torch.nn.Module,
        make_attention: MakeAttention,
        make_mlp: MakeMLP,
        rules: WeightRules,
    ):
        super().__init__(context, config, rotary, make_attention, make_mlp, rules)
        size, eps = int(required(config, "hidden_size")), float(required(config, "rms_norm_eps"))
        self.enorm = RMSNorm(context, "model.enorm", size, eps)
        self.hnorm = RMSNorm(context, "model.hnorm", size, eps)
        self.eh_proj = ColumnLinear(context, "model.eh_proj", 2 * size, size)

    def combine(self, embeddings: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.eh_proj(torch.cat((self.enorm(embeddings), self.hnorm(states)), dim=-1))
        return x


def _further_rules(rules: WeightRules, index: int) -> WeightRules:
    """Of a checkpoint's layers only one, which is layer 0 here. Checkpoints may hold copies of the main model's
    embedding and output layer in it, which are passed over."""
    own = rf"^model\.layers\.{index}\."
    renamed = (
        (r"^model\.norm\.", "unused."),
        (rf"^model\.layers\.(?!{index}\.)\d+\.", "unused."),
        (rf"{own}(?:embed_tokens|shared_head\.head)\.", "unused."),
        (rf"{own}shared_head\.norm\.", "model.norm."),
        (rf"{own}(enorm|hnorm|eh_proj)\.", r"model.\1."),
        (own, "model.layers.0."),
    )
    ignored = tuple(pattern for pattern in rules.ignored if "layers" not in pattern)
    return replace(rules, renamed=(*renamed, *rules.renamed), ignored=(*ignored, r"unused\..*"))


def _rope(config: Config) -> RopeSpec:
    """Of the rotated part of queries and keys alone."""
    return rope_spec({**config, "head_dim": required(config, "qk_rope_head_dim")})


def _scale(config: Config) -> float:
    """YaRN's temperature of all elements of queries and keys, rotated or not, is a factor of the scores; cosines and
    sines have the rest of it (`RotaryEmbedding`)."""
    rope = _rope(config)
    scale = float((int(required(config, "qk_nope_head_dim")) + rope.rotary_size) ** -0.5)
    weight, factor = rope.scaling.get("mscale_all_dim"), rope.scaling.get("factor") or 1.0
    if rope.kind == "default" or not weight or factor <= 1:
        return scale
    return scale * float(0.1 * weight * math.log(factor) + 1.0) ** 2


def _sparse_shape(config: Config) -> SparseShape:
    size = int(required(config, "moe_intermediate_size"))
    num_experts = int(required(config, "n_routed_experts", "num_experts", "num_local_experts"))
    return SparseShape(
        hidden_size=int(required(config, "hidden_size")),
        intermediate_size=size,
        num_experts=num_experts,
        top_k=int(required(config, "num_experts_per_tok")),
        normalize=False,
        hidden_act=config.get("hidden_act", "silu"),
        shared_intermediate_size=size * int(config.get("n_shared_experts") or 0),
        shared_gate=False,
        routing=_routing(config, num_experts),
    )


def _routing(config: Config, num_experts: int) -> GroupRouting:
    is_v3 = required(config, "architectures")[0] == _V3
    method = config.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    scoring = config.get("scoring_func") or ("sigmoid" if is_v3 else "softmax")
    known = {"noaux_tc": "sigmoid"} if is_v3 else {"greedy": "softmax", "group_limited_greedy": "softmax"}
    if known.get(method) != scoring:
        raise ModelError(f"topk_method {method!r} with scoring_func {scoring!r} is not known here")
    normalizes = bool(config.get("norm_topk_prob", is_v3))
    if normalizes and not is_v3:
        raise ModelError("norm_topk_prob is true: implementations of DeepSeek-V2 differ in what it means")
    return GroupRouting(
        num_experts=num_experts,
        top_k=int(required(config, "num_experts_per_tok")),
        num_groups=1 if method == "greedy" else int(required(config, "n_group")),
        top_groups=1 if method == "greedy" else int(required(config, "topk_group")),
        has_sigmoid=is_v3,
        has_bias=is_v3,
        normalize=normalizes,
        factor=float(config.get("routed_scaling_factor") or 1.0),
    )


class DeepseekAttention(torch.nn.Module):
    """Queries and the latent vector are projected down, normed and, by head, up again (DeepSeek-V2, section 2.1);
    models without q_lora_rank project queries at once. What is cached is the normed latent vector and the rotated key.

    The projections down are the same on every rank, since norms and pages need the whole vectors.
    """

    def __init__(self, context: ModelContext, config: Config, name: str):
        super().__init__()
        hidden_size, bias = int(required(config, "hidden_size")), bool(config.get("attention_bias", False))
        shape = _latent_shape(config)
        self._query_size = int(config.get("q_lora_rank") or 0)
        self._key_size, self._latent_size = shape.key_size, shape.latent_size
        self._head_size = shape.key_size + shape.rotary_size
        queries = shape.num_heads * self._head_size
        down = {f"{name}.kv_a_proj_with_mqa": shape.latent_size + shape.rotary_size}
        if self._query_size:
            down = {f"{name}.q_a_proj": self._query_size, **down}
            self.q_a_layernorm = RMSNorm(context, f"{name}.q_a_layernorm", self._query_size, _NORM_EPS)
            self.q_proj = ColumnLinear(context, f"{name}.q_b_proj", self._query_size, queries)
        else:
            self.q_proj = ColumnLinear(context, f"{name}.q_proj", hidden_size, queries)
        self.down_proj = Linear(context, f"{name}.down_proj", _whole_parts(down, hidden_size), bias)
        self.kv_a_layernorm = RMSNorm(context, f"{name}.kv_a_layernorm", shape.latent_size, _NORM_EPS)
        self.attention = LatentAttention(context, f"{name}.kv_b_proj", shape, _scale(config))
        self.o_proj = RowLinear(context, f"{name}.o_proj", shape.num_heads * shape.value_size, hidden_size, bias)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        compressed = self.down_proj(x)
        if self._query_size:
            x, compressed = self.q_a_layernorm(compressed[:, : self._query_size]), compressed[:, self._query_size :]
        query = self.q_proj(x).view(x.shape[0], -1, self._head_size)
        latent, shared_key = compressed[:, : self._latent_size], compressed[:, None, self._latent_size :]
        rotated = rotation.apply(torch.cat((query[..., self._key_size :], shared_key), dim=1))
        cached = torch.cat((self.kv_a_layernorm(latent), rotated[:, -1]), dim=-1)
        output: torch.Tensor = self.o_proj(self.attention(query[..., : self._key_size], rotated[:, :-1], cached))
        return output


def _latent_shape(config: Config) -> LatentShape:
    return LatentShape(
        num_heads=int(required(config, "num_attention_heads")),
        latent_size=int(required(config, "kv_lora_rank")),
        key_size=int(required(config, "qk_nope_head_dim")),
        rotary_size=int(required(config, "qk_rope_head_dim")),
        value_size=int(required(config, "v_head_dim")),
    )


def _whole_parts(outputs: Mapping[str, int], in_features: int) -> list[LinearPart]:
    """Layers over one input as one multiplication, whole on every rank."""
    parts, start = [], 0
    for source, size in outputs.items():
        take = slice(0, size), slice(0, in_features)
        parts.append(LinearPart(source, (size, in_features), take, slice(start, start + size)))
        start += size
    return parts


def _rules(config: Config) -> WeightRules:
    """Checkpoints pair neighbouring elements for the rotation, at the end of a query and of the compressed vector. The
    layers behind the last, which draft (multi-token prediction), are left out here."""
    shape, last = _latent_shape(config), int(required(config, "num_hidden_layers"))
    drafts = range(last, last + _num_further(config))

    def reorder(match: re.Match[str], tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        kept = shape.latent_size if match[1].startswith("kv") else shape.key_size
        heads = tensor.view(-1, kept + shape.rotary_size, *tensor.shape[1:])
        rotated = halves_from_pairs(heads[:, kept:].flatten(0, 1), shape.rotary_size, shape.rotary_size)
        return [(match[0], torch.cat((heads[:, :kept], rotated.view_as(heads[:, kept:])), dim=1).view(tensor.shape))]

    is_paired = required(config, "architectures")[0] == _V2 or config.get("rope_interleave", True)
    pairs = ((r".*\.self_attn\.(q_proj|q_b_proj|kv_a_proj_with_mqa)\.(?:weight|bias)", reorder),) if is_paired else ()
    return WeightRules(
        renamed=RULES.renamed,
        expanded=(*RULES.expanded, *pairs),
        ignored=(*RULES.ignored, *(rf"model\.layers\.{index}\..*" for index in drafts)),
    )
