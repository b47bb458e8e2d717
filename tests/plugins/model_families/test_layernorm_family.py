"""The variants of Falcon, Bloom, MPT, GPT-J and StableLM against transformers, on random checkpoints in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dovetail.contracts.model import ModelNeed
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment
from dovetail.plugins.model_families.layernorm import LayerNormFamily

SIX_HEADS = {"hidden_size": 48, "num_attention_heads": 6}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon 7b": ("falcon", {}),
    "falcon 40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "falcon in sequence": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    "bloom": ("bloom", {"n_layer": 3, "n_head": 4}),
    "bloom six heads": ("bloom", {"n_layer": 2, "n_head": 6, **SIX_HEADS}),
    "mpt": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2}),
    "mpt six heads": ("mpt", {"d_model": 48, "n_heads": 6, "n_layers": 2, **SIX_HEADS}),
    "mpt 7b": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "attn_config": {"clip_qkv": 0.5}}),
    "mpt scaled": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "attn_config": {"softmax_scale": 0.3}}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "gptj whole heads": ("gptj", {"rotary_dim": 16}),
    "stablelm": ("stablelm", {}),
    "stablelm side by side": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(make_checkpoint: Any, name: str, prompt: list[int]) -> None:
    model_type, overrides = CASES[name]
    checkpoint = make_checkpoint(model_type, **overrides)
    logits = checkpoint.run(LayerNormFamily).logits(prompt, chunk=7)
    torch.testing.assert_close(logits, checkpoint.logits(prompt), rtol=0, atol=2e-5)


def test_the_strongest_slope_of_mpt_is_the_config_s(make_checkpoint: Any) -> None:
    """Storywriter has 16; transformers reads the key and takes 8 all the same."""
    config = make_checkpoint("mpt", d_model=64, n_heads=4, n_layers=2).config | {"attn_config": {"alibi_bias_max": 16}}
    checkpoint = make_checkpoint("mpt", d_model=64, n_heads=4, n_layers=2)
    (layer, *_) = checkpoint.run(LayerNormFamily, config=config).context.attention_layers
    assert layer.layer.alibi_slopes == (2**-4, 2**-8, 2**-12, 2**-16)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("falcon", {"alibi": True}, "alibi = True is not served"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "without parallel_attn"),
        ("stablelm", {"qk_layernorm": True}, "each head would have a norm of its own"),
        ("mpt", {"attn_config": {"alibi": False}}, "learned positions"),
        ("mpt", {"no_bias": False}, "no MPT with biases"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "through the norms"),
        ("gptj", {"architectures": ["GPTNeoForCausalLM"]}, "GPTNeoForCausalLM is none of"),
    ],
)
def test_check_says_why_not(make_checkpoint: Any, model_type: str, changes: Any, reason: str) -> None:
    sizes = {"falcon": {}, "stablelm": {}, "gptj": {"rotary_dim": 8}, "bloom": {"n_layer": 3, "n_head": 4}}
    mpt = {"d_model": 64, "n_heads": 4, "n_layers": 2}
    config = make_checkpoint(model_type, **sizes.get(model_type, mpt)).config | changes
    need = ModelNeed(config=config, tensor_parallel=1, device_type="cpu", dtype="float32")
    (answer,) = reasons_against(
        LayerNormFamily, need, LayerNormFamily.Options(), Environment("cpu", num_cpus=1, memory_bytes=1 << 30)
    )
    assert reason in answer
