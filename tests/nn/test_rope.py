"""Rotation against the functions of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from dovetail.contracts.errors import ModelError
from dovetail.nn import RopeSpec, RotaryEmbedding
from dovetail.nn.hf_config import longest_sequence, rope_spec
from dovetail.nn.rope import inverse_frequencies

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **LLAMA3},
    "llama3 with another ramp": {"rope_type": "llama3", "factor": 32.0, **LLAMA3, "high_freq_factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **YARN},
    "yarn, base 1e6": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, **YARN},
    "yarn, ramp not rounded": {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 16.0, **YARN},
    "yarn, temperature given": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, **YARN},
    "yarn of DeepSeek": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0, **YARN},
}


def llama_config(parameters: dict[str, Any], **kwargs: Any) -> LlamaConfig:
    values = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 256} | kwargs
    return LlamaConfig(rope_parameters={"rope_theta": 10000.0, **parameters}, **values)


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_bit_for_bit_those_of_transformers(kind: str) -> None:
    config = llama_config(KINDS[kind])
    frequencies, factor = inverse_frequencies(rope_spec(config.to_dict()), max_model_len=64)
    if kind == "default":
        expected, expected_factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[KINDS[kind]["rope_type"]](config)
    assert torch.equal(frequencies, expected)
    assert factor == expected_factor


@pytest.mark.parametrize(("given", "max_model_len"), [({}, 64), ({}, 65), ({"attention_factor": 1.5}, 256)])
def test_longrope_takes_the_factors_of_the_longest_context(given: dict[str, Any], max_model_len: int) -> None:
    factors = {"short_factor": [1.0 + i / 32 for i in range(32)], "long_factor": [2.0 + i for i in range(32)]}
    config = llama_config({"rope_type": "longrope", "original_max_position_embeddings": 64, **factors, **given})
    frequencies, factor = inverse_frequencies(rope_spec(config.to_dict()), max_model_len)
    expected, expected_factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=max_model_len)
    assert torch.equal(frequencies, expected)
    assert factor == expected_factor


def test_longrope_needs_a_factor_for_each_dimension() -> None:
    factors = {"short_factor": [1.0] * 31, "long_factor": [2.0] * 31}
    config = llama_config({"rope_type": "longrope", "original_max_position_embeddings": 64, **factors})
    with pytest.raises(ModelError, match="long_factor needs 32 numbers, got 31"):
        inverse_frequencies(rope_spec(config.to_dict()), 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_rotated_heads_are_bit_for_bit_those_of_transformers(make_context: Any, kind: str, dtype: torch.dtype) -> None:
    config = llama_config(KINDS[kind])
    positions = torch.tensor([0, 1, 63, 5, 5])
    heads = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    rotary = RotaryEmbedding(make_context(dtype=dtype), rope_spec(config.to_dict()))
    cos, sin = LlamaRotaryEmbedding(config)(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads[None], heads[None], cos, sin, unsqueeze_dim=2)
    assert torch.equal(rotary(positions).apply(heads), expected[0])


def test_a_partial_rotation_leaves_the_rest_alone(make_context: Any) -> None:
    spec = rope_spec({**llama_config(KINDS["default"]).to_dict(), "partial_rotary_factor": 0.25})
    assert (spec.head_size, spec.rotary_size) == (64, 16)
    heads = torch.randn(4, 2, 64)
    rotated = RotaryEmbedding(make_context(), spec)(torch.arange(4)).apply(heads)
    whole = RotaryEmbedding(
        make_context(), RopeSpec(head_size=16, rotary_size=16, theta=10000.0, max_position_embeddings=256)
    )(torch.arange(4))
    assert torch.equal(rotated[..., 16:], heads[..., 16:])
    assert torch.equal(rotated[..., :16], whole.apply(heads[..., :16]))


def test_dynamic_scaling_serves_the_trained_length_and_refuses_more() -> None:
    spec = rope_spec(llama_config({"rope_type": "dynamic", "factor": 2.0}).to_dict())
    plain = rope_spec(llama_config(KINDS["default"]).to_dict())
    assert torch.equal(inverse_frequencies(spec, 256)[0], inverse_frequencies(plain, 256)[0])
    with pytest.raises(ModelError, match=r"set model\.max_model_len to 256 or less"):
        inverse_frequencies(spec, 257)


def test_unknown_kinds_and_missing_keys_are_refused() -> None:
    with pytest.raises(ModelError, match="'abacus' is not known here; known are default, linear"):
        inverse_frequencies(
            RopeSpec(head_size=64, rotary_size=64, theta=10000.0, max_position_embeddings=256, kind="abacus"), 64
        )
    with pytest.raises(ModelError, match="'linear' needs the key 'factor'"):
        inverse_frequencies(
            RopeSpec(head_size=64, rotary_size=64, theta=10000.0, max_position_embeddings=256, kind="linear"), 64
        )


def test_old_and_new_spellings_mean_the_same() -> None:
    base = {"hidden_size": 128, "num_attention_heads": 2, "max_position_embeddings": 256}
    old = base | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = base | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    frequencies = [inverse_frequencies(rope_spec(config), 64)[0] for config in (old, new)]
    assert torch.equal(*frequencies)
    assert longest_sequence(rope_spec(old)) == 512
