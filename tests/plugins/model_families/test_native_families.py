"""The native families against transformers, on random checkpoints in float32."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch

from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.contracts.attention import RotatesAndWrites
from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import ModelNeed
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment
from dovetail.nn.operators import torch_operators
from dovetail.plugins.model_families.gemma import GemmaFamily
from dovetail.plugins.model_families.llama import LlamaFamily
from dovetail.plugins.model_families.llama4 import Llama4Family
from dovetail.plugins.model_families.moe import MoEFamily
from dovetail.testing.tiny_models import old_spelling, read_weights

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
GEMMA3_SCALED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "llama": (LlamaFamily, "llama", {}),
    "llama tied": (LlamaFamily, "llama", {"tie_word_embeddings": True}),
    "llama biases": (LlamaFamily, "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama one kv head": (LlamaFamily, "llama", {"num_key_value_heads": 1, "head_dim": 8}),
    "llama llama3 rope": (LlamaFamily, "llama", {"rope_parameters": LLAMA3}),
    "llama yarn rope": (LlamaFamily, "llama", {"rope_parameters": YARN}),
    "llama linear rope": (LlamaFamily, "llama", {"rope_parameters": LINEAR}),
    "mistral": (LlamaFamily, "mistral", {"sliding_window": None}),
    "mistral window": (LlamaFamily, "mistral", {"sliding_window": 8}),
    "qwen2": (LlamaFamily, "qwen2", {}),
    "qwen2 window": (
        LlamaFamily,
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": (LlamaFamily, "qwen3", {}),
    "gemma2": (GemmaFamily, "gemma2", {}),
    "gemma3": (GemmaFamily, "gemma3_text", {}),
    "gemma3 scaled": (GemmaFamily, "gemma3_text", {"rope_parameters": GEMMA3_SCALED, "tie_word_embeddings": False}),
    "mixtral": (MoEFamily, "mixtral", {"sliding_window": 8}),
    "qwen2_moe": (MoEFamily, "qwen2_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 3}),
    "qwen2_moe window": (
        MoEFamily,
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 8, "norm_topk_prob": True},
    ),
    "llama4": (Llama4Family, "llama4_text", {}),
    "llama4 plain": (
        Llama4Family,
        "llama4_text",
        {"use_qk_norm": False, "attn_temperature_tuning": False, "attention_bias": True, "num_experts_per_tok": 1},
    ),
    "llama4 llama3 rope": (Llama4Family, "llama4_text", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "qwen3_moe": (MoEFamily, "qwen3_moe", {"mlp_only_layers": [0]}),
}

ENVIRONMENT = Environment(device_type="cpu", num_cpus=1, memory_bytes=1 << 30)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, make_checkpoint: Any) -> tuple[Any, Any]:
    """(family class, checkpoint)."""
    family_class, model_type, overrides = CASES[request.param]
    return family_class, make_checkpoint(model_type, **copy.deepcopy(overrides))


def test_logits_equal_those_of_transformers(case: Any, prompt: list[int]) -> None:
    family_class, checkpoint = case
    harness = checkpoint.run(family_class)
    expected = checkpoint.logits(prompt)
    torch.testing.assert_close(harness.logits(prompt), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(harness.logits(prompt, chunk=7), expected, rtol=0, atol=2e-5)


def test_greedy_tokens_equal_those_of_transformers_for_two_prompts_in_one_batch(case: Any, prompt: list[int]) -> None:
    family_class, checkpoint = case
    prompts = [prompt, prompt[5:14]]
    expected = [checkpoint.generate(one, 32) for one in prompts]
    assert checkpoint.run(family_class).generate(prompts, 32) == expected


def test_embeddings_are_what_enters_the_first_layer(case: Any, prompt: list[int]) -> None:
    family_class, checkpoint = case
    ids = torch.tensor(prompt)
    with torch.no_grad():
        expected = checkpoint.oracle(ids[None], output_hidden_states=True).hidden_states[0][0]
    torch.testing.assert_close(checkpoint.run(family_class).model.embed(ids), expected)


def test_configs_of_transformers_4_mean_the_same(case: Any, prompt: list[int]) -> None:
    family_class, checkpoint = case
    old = checkpoint.run(family_class, config=old_spelling(checkpoint.config))
    assert torch.equal(old.logits(prompt), checkpoint.run(family_class).logits(prompt))


def test_the_size_is_that_of_the_transformers_model(case: Any) -> None:
    family_class, checkpoint = case
    size = family_class(family_class.Options()).size(checkpoint.config)
    assert size.num_parameters == checkpoint.oracle.num_parameters()
    assert size.num_layers == checkpoint.config["num_hidden_layers"]
    assert size.num_kv_heads == checkpoint.config["num_key_value_heads"]


def test_bfloat16_stays_close_to_float32(case: Any, prompt: list[int]) -> None:
    family_class, checkpoint = case
    logits = checkpoint.run(family_class, dtype=torch.bfloat16).logits(prompt).float()
    assert torch.nn.functional.cosine_similarity(logits, checkpoint.logits(prompt)).mean() > 0.98


class RotatingReference(ReferenceBackend, RotatesAndWrites):
    """A third party's backend that rotates by itself, and wants nothing that is rotated already."""

    contract = (1, 0)

    unrotated: ClassVar[frozenset[int]] = frozenset()
    """Layers without rotary positions."""

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any) -> torch.Tensor:
        assert layer.layer_id in self.unrotated, "the host has rotated"
        return super().forward(layer, query, key, value, kv_cache)

    def rotate_and_forward(
        self, layer: Any, query: Any, key: Any, value: Any, cos: Any, sin: Any, kv_cache: Any
    ) -> torch.Tensor:
        rotate = torch_operators().rotate
        return super().forward(layer, rotate(query, cos, sin), rotate(key, cos, sin), value, kv_cache)


class RotatingButOne(RotatingReference):
    """For the tiny Llama 4, whose fourth layer has no positions."""

    unrotated = frozenset({3})


def test_a_backend_that_rotates_gives_the_same_logits(case: Any, prompt: list[int]) -> None:
    family_class, checkpoint = case
    backend = RotatingButOne if family_class is Llama4Family else RotatingReference
    rotating = checkpoint.run(family_class, backend=backend)
    assert torch.equal(rotating.logits(prompt, chunk=30), checkpoint.run(family_class).logits(prompt, chunk=30))


def test_windows_that_no_sequence_outgrows_are_full_attention(make_checkpoint: Any) -> None:
    checkpoint = make_checkpoint("mistral", sliding_window=8)
    layers = checkpoint.run(LlamaFamily, max_model_len=8).context.attention_layers
    assert [attention.cache.window for attention in layers] == [None, None]


@pytest.mark.parametrize(
    ("kind", "longest"), [("yarn", 128), ("linear", 512), ("llama3", 256)], ids=["yarn", "linear", "llama3"]
)
def test_the_longest_sequence_includes_rope_scaling(make_checkpoint: Any, kind: str, longest: int) -> None:
    parameters = {"yarn": YARN | {"factor": 4.0}, "linear": LINEAR, "llama3": LLAMA3}[kind]
    config = make_checkpoint("llama").config | {"rope_parameters": parameters}
    if kind == "yarn":
        config |= {"max_position_embeddings": 32}
    assert LlamaFamily(LlamaFamily.Options()).size(config).max_model_len == longest


def test_layers_of_llama4_go_by_chunks_where_they_rotate(make_checkpoint: Any) -> None:
    """A sequence no longer than a chunk needs none."""
    checkpoint = make_checkpoint("llama4_text")
    layers = [one.layer for one in checkpoint.run(Llama4Family).context.attention_layers]
    assert [layer.chunk for layer in layers] == [8, 8, 8, None, 8]
    assert [one.cache.window for one in checkpoint.run(Llama4Family).context.attention_layers] == [8, 8, 8, None, 8]
    short = checkpoint.run(Llama4Family, max_model_len=8).context.attention_layers
    assert [one.layer.chunk for one in short] == [None] * 5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_chunk_size": None}, "need attention_chunk_size"),
        ({"floor_scale": 0}, "floor_scale must be a number above 0"),
        ({"layer_types": ["sliding_attention"] * 5}, "sliding_attention are not known here"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers names 2 layers"),
    ],
)
def test_llama4_says_why_not(make_checkpoint: Any, changes: Any, reason: str) -> None:
    need = ModelNeed(
        config=make_checkpoint("llama4_text").config | changes, tensor_parallel=1, device_type="cpu", dtype="float32"
    )
    (answer,) = reasons_against(Llama4Family, need, Llama4Family.Options(), ENVIRONMENT)
    assert reason in answer


def test_experts_are_read_in_the_fused_layout_too(make_checkpoint: Any, prompt: list[int]) -> None:
    checkpoint = make_checkpoint("mixtral", sliding_window=8)
    fused = [(name, tensor.detach()) for name, tensor in checkpoint.oracle.state_dict().items()]
    assert any(name.endswith("experts.gate_up_proj") for name, _ in fused)
    harness = checkpoint.run(MoEFamily, weights=fused)
    assert torch.equal(harness.logits(prompt), checkpoint.run(MoEFamily).logits(prompt))


def test_a_stored_copy_of_tied_weights_is_accepted(make_checkpoint: Any, prompt: list[int]) -> None:
    checkpoint = make_checkpoint("llama", tie_word_embeddings=True)
    weights = dict(read_weights(checkpoint.directory))
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    harness = checkpoint.run(LlamaFamily, weights=weights.items())
    assert torch.equal(harness.logits(prompt), checkpoint.run(LlamaFamily).logits(prompt))


def test_a_checkpoint_that_does_not_fit_is_refused_with_every_name(make_checkpoint: Any) -> None:
    checkpoint = make_checkpoint("llama")
    weights = dict(read_weights(checkpoint.directory))
    del weights["model.layers.1.self_attn.k_proj.weight"]
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(95, 64)
    weights["model.layers.7.mlp.up_proj.weight"] = torch.zeros(96, 64)
    with pytest.raises(ModelError) as refusal:
        checkpoint.run(LlamaFamily, weights=weights.items())
    message = str(refusal.value)
    assert "missing (1): model.layers.1.self_attn.k_proj.weight [32, 64]" in message
    assert "not expected (1): model.layers.7.mlp.up_proj.weight [96, 64]" in message
    assert "model.layers.0.mlp.up_proj.weight has shape [95, 64], the config implies [96, 64]" in message


@pytest.mark.parametrize(
    ("overrides", "tensor_parallel", "reason"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, 1, "'spiral'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, 1, "'low_freq_factor'"),
        ({"hidden_act": "sine"}, 1, "'sine'"),
        ({"hidden_size": None}, 1, "'hidden_size'"),
        ({}, 3, "does not divide by tensor_parallel=3"),
        ({"architectures": ["OtherForCausalLM"]}, 1, "OtherForCausalLM"),
    ],
)
def test_check_says_why_not(make_checkpoint: Any, overrides: Any, tensor_parallel: int, reason: str) -> None:
    need = ModelNeed(
        config=make_checkpoint("llama").config | overrides,
        tensor_parallel=tensor_parallel,
        device_type="cpu",
        dtype="float32",
    )
    (answer,) = reasons_against(LlamaFamily, need, LlamaFamily.Options(), ENVIRONMENT)
    assert reason in answer


def test_check_has_nothing_against_what_the_family_serves(case: Any) -> None:
    family_class, checkpoint = case
    need = ModelNeed(config=checkpoint.config, tensor_parallel=2, device_type="cpu", dtype="float32")
    assert reasons_against(family_class, need, family_class.Options(), ENVIRONMENT) == []
