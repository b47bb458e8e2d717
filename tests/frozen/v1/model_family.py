"""Llama, as the paper has it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import (
    CausalLM,
    ModelCapabilities,
    ModelContext,
    ModelFamily,
    ModelInputs,
    ModelNeed,
    ModelOutputs,
    ModelSize,
)
from dovetail.contracts.plugin import Environment
from dovetail.nn import (
    Attention,
    GatedMLP,
    LMHead,
    QKVLinear,
    RMSNorm,
    RopeSpec,
    RotaryEmbedding,
    Rotation,
    RowLinear,
    VocabEmbedding,
    WeightRules,
    load_weights,
)
from dovetail.nn.planning import planned_size, reasons_against


class Layer(torch.nn.Module):
    def __init__(self, context: ModelContext, config: Mapping[str, Any], name: str):
        super().__init__()
        size, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
        head = size // heads
        self.input_norm = RMSNorm(context, f"{name}.input_layernorm", size, config["rms_norm_eps"])
        names = (f"{name}.self_attn.q_proj", f"{name}.self_attn.k_proj", f"{name}.self_attn.v_proj")
        self.qkv = QKVLinear(context, f"{name}.self_attn.qkv_proj", size, heads, kv_heads, head, names)
        self.attention = Attention(context, self.qkv.num_heads, self.qkv.num_kv_heads, head, head**-0.5)
        self.output = RowLinear(context, f"{name}.self_attn.o_proj", size, size)
        self.mlp_norm = RMSNorm(context, f"{name}.post_attention_layernorm", size, config["rms_norm_eps"])
        self.mlp = GatedMLP(context, f"{name}.mlp", size, config["intermediate_size"], "silu")

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        heads = self.qkv(self.input_norm(x)).unflatten(-1, (-1, self.qkv.head_size))
        queries_keys, value = heads[:, : -self.qkv.num_kv_heads], heads[:, -self.qkv.num_kv_heads :]
        x = x + self.output(self.attention.rotate_and_forward(queries_keys, value, rotation))
        return x + self.mlp(self.mlp_norm(x))


class Model(torch.nn.Module):
    def __init__(self, context: ModelContext, config: Mapping[str, Any]):
        super().__init__()
        if not (context.is_first_stage and context.is_last_stage):
            raise ModelError("frozen builds whole models: set executor.pipeline_parallel to 1")
        if config["architectures"][0] not in Frozen.architectures:
            raise ModelError(f"{config['architectures'][0]} is none of {Frozen.architectures}")
        size, vocabulary = config["hidden_size"], config["vocab_size"]
        self.embedding = VocabEmbedding(context, "model.embed_tokens", vocabulary, size)
        self.rotary = RotaryEmbedding(context, rope(config))
        layers = (Layer(context, config, f"model.layers.{i}") for i in range(config["num_hidden_layers"]))
        self.layers = torch.nn.ModuleList(layers)
        self.norm = RMSNorm(context, "model.norm", size, config["rms_norm_eps"])
        tied = self.embedding if config.get("tie_word_embeddings") else None
        self.head = LMHead(context, "lm_head", vocabulary, size, tied)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(input_ids)

    def forward(self, inputs: ModelInputs) -> ModelOutputs:
        if inputs.adapters is not None or inputs.layers or inputs.positions.dim() > 1:
            raise ModelError("frozen takes token ids or embeddings, with positions on one axis")
        x = inputs.embeddings if inputs.input_ids is None else self.embed(inputs.input_ids)
        rotation = self.rotary(inputs.positions)
        for layer in self.layers:
            x = layer(x, rotation)
        return ModelOutputs(hidden=self.norm(x))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def load_weights(self, weights: Iterable[tuple[str, Any]], partial: bool = False) -> None:
        load_weights(self, weights, WeightRules(), partial=partial)


def rope(config: Mapping[str, Any]) -> RopeSpec:
    head = config["hidden_size"] // config["num_attention_heads"]
    theta = config.get("rope_parameters", config)["rope_theta"]
    return RopeSpec(
        head_size=head, rotary_size=head, theta=theta, max_position_embeddings=config["max_position_embeddings"]
    )


class Frozen(ModelFamily):
    contract = (1, 0)
    architectures = ("LlamaForCausalLM",)
    capabilities = ModelCapabilities(tensor_parallel=None, quantization=True, operators=True, batch_invariant=True)
    preference = -100

    @classmethod
    def check(cls, need: ModelNeed, options: Any, environment: Environment) -> list[str]:
        return reasons_against(lambda config, context: Model(context, config), need)

    def size(self, config: Mapping[str, Any]) -> ModelSize:
        return planned_size(lambda config, context: Model(context, config), config, config["max_position_embeddings"])

    def create(self, config: Mapping[str, Any], context: ModelContext) -> CausalLM:
        return Model(context, config)
