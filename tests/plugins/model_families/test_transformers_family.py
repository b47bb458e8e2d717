"""Models that transformers builds, over our paged attention, against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import ModelNeed
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment
from dovetail.contracts.quantization import QuantizationNeed
from dovetail.plugins.model_families.transformers import TransformersFamily
from dovetail.plugins.model_families.transformers_attention import MaskRule
from dovetail.plugins.quantization.int8 import Int8Method
from dovetail.testing.tiny_models import read_weights

ENVIRONMENT = Environment(device_type="cpu", num_cpus=1, memory_bytes=1 << 30)
MLA = {
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma2: soft caps, alternating windows": ("gemma2", {}),
    "gemma3: two rotations": ("gemma3_text", {}),
    "mixtral: experts in another layout": ("mixtral", {"sliding_window": 8}),
    "qwen2_moe: window known to the mask alone": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8}),
    "gpt2: learned positions": ("gpt2", {}),
    "opt: positions with an offset": ("opt", {}),
    "gpt_neox: partial rotation, parallel blocks": ("gpt_neox", {}),
    "phi3: fused projections": ("phi3", {"sliding_window": 8}),
    "cohere2: scaled logits, layers without positions": ("cohere2", {"sliding_window": 8}),
    "granite: scaled everything": ("granite", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
    "deepseek_v3: values narrower than keys": ("deepseek_v3", MLA),
}


@pytest.mark.parametrize("name", SERVED)
def test_logits_and_greedy_tokens_equal_those_of_transformers(
    make_checkpoint: Any, prompt: list[int], name: str
) -> None:
    model_type, overrides = SERVED[name]
    checkpoint = make_checkpoint(model_type, **overrides)
    harness = checkpoint.run(TransformersFamily)
    torch.testing.assert_close(harness.logits(prompt, chunk=11), checkpoint.logits(prompt), rtol=0, atol=2e-5)
    ids = torch.tensor(prompt)
    assert torch.equal(harness.model.embed(ids), checkpoint.oracle.get_input_embeddings()(ids))
    prompts = [prompt, prompt[5:14]]
    assert harness.generate(prompts, 32) == [checkpoint.generate(one, 32) for one in prompts]


def test_experts_that_transformers_joins_are_loaded_together_or_refused(
    make_checkpoint: Any, prompt: list[int]
) -> None:
    checkpoint = make_checkpoint("mixtral")
    harness, weights = checkpoint.run(TransformersFamily), dict(read_weights(checkpoint.directory))
    ups = [
        name for name in weights if name.startswith("model.layers.1.") and name.endswith((".w1.weight", ".w3.weight"))
    ]
    with pytest.raises(ModelError, match="experts of a layer, must be given together"):
        harness.model.load_weights([(ups[0], weights[ups[0]])], partial=True)
    new = {name: 0.5 * weights[name] for name in ups}
    harness.model.load_weights(new.items(), partial=True)
    fresh = checkpoint.run(TransformersFamily, weights=(weights | new).items())
    assert torch.equal(harness.logits(prompt), fresh.logits(prompt))


@pytest.mark.parametrize("name", ["llama", "gpt2: learned positions", "deepseek_v3: values narrower than keys"])
def test_the_size_is_that_of_the_transformers_model(make_checkpoint: Any, name: str) -> None:
    model_type, overrides = SERVED[name]
    checkpoint = make_checkpoint(model_type, **overrides)
    size = TransformersFamily(TransformersFamily.Options()).size(checkpoint.config)
    assert size.num_parameters == checkpoint.oracle.num_parameters()
    assert (size.num_layers, size.vocab_size, size.max_model_len) == (2, 128, 256)


@pytest.mark.parametrize(
    ("model_type", "overrides", "tensor_parallel", "reason"),
    [
        ("mamba", {}, 1, "keeps a recurrent state"),
        ("bloom", {}, 1, "does not go through transformers' attention registry"),
        ("t5", {}, 1, "encoder-decoder"),
        ("llama", {}, 2, "up to 1 tensor-parallel rank"),
        ("nonesuch", {}, 1, "knows no model_type 'nonesuch'"),
    ],
)
def test_check_says_why_not(model_type: str, overrides: Any, tensor_parallel: int, reason: str) -> None:
    config = {"model_type": model_type, "is_encoder_decoder": model_type == "t5", **overrides}
    need = ModelNeed(config=config, tensor_parallel=tensor_parallel, device_type="cpu", dtype="float32")
    answers = reasons_against(TransformersFamily, need, TransformersFamily.Options(), ENVIRONMENT)
    assert any(reason in answer for answer in answers)


def test_check_has_nothing_against_a_model_it_serves(make_checkpoint: Any) -> None:
    need = ModelNeed(config=make_checkpoint("gpt2").config, tensor_parallel=1, device_type="cpu", dtype="float32")
    assert reasons_against(TransformersFamily, need, TransformersFamily.Options(), ENVIRONMENT) == []


@pytest.mark.parametrize(
    ("model_type", "overrides", "reason"),
    [
        ("minimax", {"num_local_experts": 4}, "mixes tokens outside of attention"),
        ("llama4_text", {"attention_chunk_size": 32}, "goes by chunks of 32 tokens"),
        ("llama4_text", {"attention_chunk_size": 0}, "need attention_chunk_size, a number above 0, got 0"),
        (
            "llama",
            {
                "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                "max_position_embeddings": 64,
            },
            "rescales positions",
        ),
    ],
)
def test_what_one_flat_batch_cannot_compute_is_refused(
    make_checkpoint: Any, model_type: str, overrides: Any, reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        make_checkpoint(model_type, **overrides).run(TransformersFamily)


def test_quantization_is_refused_rather_than_ignored(make_checkpoint: Any) -> None:
    int8 = Int8Method(Int8Method.Options(), QuantizationNeed("cpu", "float32"))
    with pytest.raises(ModelError, match="unquantized"):
        make_checkpoint("llama").run(TransformersFamily, quantization=int8)


def test_a_checkpoint_that_does_not_fit_is_refused_with_names(make_checkpoint: Any) -> None:
    checkpoint = make_checkpoint("llama")
    weights = dict(read_weights(checkpoint.directory))
    del weights["model.layers.1.self_attn.k_proj.weight"]
    weights["model.norm.weight"] = torch.zeros(63)
    with pytest.raises(ModelError) as refusal:
        checkpoint.run(TransformersFamily, weights=weights.items())
    assert "missing (1): model.layers.1.self_attn.k_proj.weight" in str(refusal.value)
    assert "model.norm.weight" in str(refusal.value)


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_attn_implementation_internal"])
def test_a_kernel_that_the_config_names_is_not_fetched(make_checkpoint: Any, key: str) -> None:
    config = make_checkpoint("gpt2").config | {key: "somebody/kernel", "auto_map": {"AutoConfig": "evil.Config"}}
    size = TransformersFamily(TransformersFamily.Options()).size(config)
    assert size.num_layers == 2


def causal(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key <= query


def test_a_window_is_read_off_the_mask_rule() -> None:
    assert MaskRule(causal).window(64) is None
    assert MaskRule(lambda b, h, q, k: (k <= q) & (k > q - 5)).window(64) == 5
    assert MaskRule(lambda b, h, q, k: (k <= q) & (k > q - 100)).window(64) is None


@pytest.mark.parametrize(
    "rule",
    [lambda b, h, q, k: k >= 0, lambda b, h, q, k: (k <= q) & (k // 16 == q // 16), lambda b, h, q, k: k < q],
    ids=["bidirectional", "chunks", "without itself"],
)
def test_other_mask_rules_are_refused(rule: Any) -> None:
    with pytest.raises(ModelError, match="neither causal"):
        MaskRule(rule).window(64)
