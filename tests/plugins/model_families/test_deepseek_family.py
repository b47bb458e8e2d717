"""DeepSeek-V2 and V3 against transformers, which computes keys and values of all heads, on random checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.contracts.kv import LatentSpec
from dovetail.contracts.model import ModelNeed
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment
from dovetail.contracts.quantization import QuantizationNeed
from dovetail.nn import PackedLinear
from dovetail.plugins.model_families.deepseek import DeepseekFamily
from dovetail.plugins.quantization.int8 import Int8Method
from dovetail.testing.tiny_models import old_spelling, read_weights
from dovetail.worker.kv_size import kv_bytes_per_token

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.8,
    "mscale_all_dim": 1.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("deepseek_v3", {}),
    "v3 in halves, at once": (
        "deepseek_v3",
        {"rope_interleave": False, "q_lora_rank": None, "norm_topk_prob": False, "attention_bias": True},
    ),
    "v3 yarn": ("deepseek_v3", {"rope_parameters": YARN, "n_group": 1, "topk_group": 1, "attention_bias": True}),
    "v2": ("deepseek_v2", {}),
    "v2 greedy, yarn": ("deepseek_v2", {"topk_method": "greedy", "rope_parameters": YARN, "q_lora_rank": None}),
}


@pytest.fixture(params=CASES)
def checkpoint(request: pytest.FixtureRequest, make_checkpoint: Any) -> Any:
    model_type, overrides = CASES[request.param]
    return make_checkpoint(model_type, **overrides)


def test_logits_equal_those_of_transformers(checkpoint: Any, prompt: list[int]) -> None:
    harness, expected = checkpoint.run(DeepseekFamily), checkpoint.logits(prompt)
    torch.testing.assert_close(harness.logits(prompt), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(harness.logits(prompt, chunk=7), expected, rtol=0, atol=2e-5)


def test_greedy_tokens_equal_those_of_transformers_for_two_prompts_in_one_batch(
    checkpoint: Any, prompt: list[int]
) -> None:
    prompts = [prompt, prompt[5:14]]
    assert checkpoint.run(DeepseekFamily).generate(prompts, 24) == [checkpoint.generate(one, 24) for one in prompts]


def test_configs_of_transformers_4_mean_the_same(checkpoint: Any, prompt: list[int]) -> None:
    old = checkpoint.run(DeepseekFamily, config=old_spelling(checkpoint.config))
    assert torch.equal(old.logits(prompt), checkpoint.run(DeepseekFamily).logits(prompt))


def test_bfloat16_stays_close_to_float32(checkpoint: Any, prompt: list[int]) -> None:
    """Experts that are chosen by rounding aside."""
    logits = checkpoint.run(DeepseekFamily, dtype=torch.bfloat16).logits(prompt).float()
    assert torch.nn.functional.cosine_similarity(logits, checkpoint.logits(prompt)).median() > 0.98


def test_a_token_takes_the_bytes_of_one_vector_per_layer_on_every_rank(make_checkpoint: Any) -> None:
    """Sizes of DeepSeek-V2 (section 2.1.4 of its paper): 576 elements per token and layer."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    config = make_checkpoint("deepseek_v2").config | sizes
    size = DeepseekFamily(DeepseekFamily.Options()).size(config)
    assert size.cache("bfloat16") == LatentSpec(latent_size=512, rotary_size=64, dtype="bfloat16")
    for ranks in (1, 4):
        assert kv_bytes_per_token(size, "bfloat16", ranks) == config["num_hidden_layers"] * 576 * 2


def test_layers_that_draft_are_left_out(make_checkpoint: Any, prompt: list[int], caplog: Any) -> None:
    """Checkpoints of V3 hold a layer for multi-token prediction behind the last."""
    checkpoint = make_checkpoint("deepseek_v3")
    weights = dict(read_weights(checkpoint.directory))
    behind = {name.replace("layers.1.", "layers.2."): one for name, one in weights.items() if "layers.1." in name}
    with_drafts = weights | behind | {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}
    config = checkpoint.config | {"num_nextn_predict_layers": 1}
    harness = checkpoint.run(DeepseekFamily, config=config, weights=with_drafts.items())
    assert torch.equal(harness.logits(prompt), checkpoint.run(DeepseekFamily).logits(prompt))
    assert not caplog.records


def test_quantized_linear_layers_leave_the_absorbed_one_in_full_precision(
    make_checkpoint: Any, prompt: list[int]
) -> None:
    checkpoint = make_checkpoint("deepseek_v3")
    method = Int8Method(Int8Method.Options(), QuantizationNeed("cpu", "float32"))
    harness = checkpoint.run(DeepseekFamily, quantization=method)
    attention = harness.model.layers[1].self_attn
    assert [type(layer.kernel) is PackedLinear for layer in (attention.down_proj, attention.q_proj)] == [False] * 2
    up = dict(read_weights(checkpoint.directory))["model.layers.1.self_attn.kv_b_proj.weight"]
    assert torch.equal(attention.attention._up.flatten(0, 1), up)
    logits = harness.logits(prompt)
    assert torch.nn.functional.cosine_similarity(logits, checkpoint.logits(prompt)).median() > 0.98


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method 'greedy' with scoring_func 'sigmoid' is not known"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' with scoring_func 'softmax' is not known"),
        ("deepseek_v2", {"norm_topk_prob": True}, "implementations of DeepSeek-V2 differ in what it means"),
        ("deepseek_v2", {"n_group": 3}, "8 experts cannot be divided into 3 groups"),
        ("deepseek_v3", {"topk_group": 1}, "3 experts cannot be chosen from 1 of 4 groups of 2"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 8}, "groups of one expert have no two best ones"),
        ("deepseek_v3", {"kv_lora_rank": None}, "lacks 'kv_lora_rank'"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "7 of each head's 7 cannot be rotated"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(
    make_checkpoint: Any, model_type: str, changes: Any, reason: str
) -> None:
    config = make_checkpoint(model_type).config | changes
    need = ModelNeed(config=config, tensor_parallel=1, device_type="cpu", dtype="float32")
    environment = Environment(device_type="cpu", num_cpus=1, memory_bytes=1 << 30)
    (answer,) = reasons_against(DeepseekFamily, need, DeepseekFamily.Options(), environment)
    assert reason in answer
