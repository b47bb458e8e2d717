"""What a config.json may say, beside the tensors of its checkpoint."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.config.load import load_config
from dovetail.contracts.errors import DovetailError, ModelError
from dovetail.engine.explanation import explain
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [5, 6, 7, 8]
FILES = ("config.json", "model.safetensors")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model(directory, tiny_config("llama", num_hidden_layers=1))
    return directory


@pytest.fixture
def changed(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    """The model with other values in its config.json, and tensors added."""

    def change(tensors: dict[str, torch.Tensor] | None = None, **values: Any) -> Path:
        return write(llama, tmp_path, values, tensors)

    return change


def write(source: Path, target: Path, values: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    config = json.loads((source / "config.json").read_text()) | values
    (target / "config.json").write_text(json.dumps(config))
    save_file(load_file(source / "model.safetensors") | (tensors or {}), target / "model.safetensors")
    return target


def start(path: Path, **model: Any) -> LLM:
    section = {"path": str(path), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 32, **model}
    return LLM(config={"model": section, "cache": {"block_size": 4, "num_blocks": 40}, "executor": {"threads": 1}})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648, and the checkpoint has 12 tensors"),
        ({"head_dim": 2**31}, "head_dim is 2147483648, and the longest side of any tensor .* is 128"),
        ({"hidden_size": 2**31}, "hidden_size is 2147483648"),
        ({"vocab_size": 2**40}, "vocab_size is"),
        ({"hidden_size": -1}, "hidden_size: Input should be greater than or equal to 1, got -1"),
        ({"num_attention_heads": 0}, "num_attention_heads: .*, got 0"),
        ({"hidden_size": "64"}, "hidden_size: .* should be a number, not text, got '64'"),
        ({"eos_token_id": "0.0"}, "eos_token_id: .*, got '0.0'"),
        ({"text_config": {"eos_token_id": [True]}}, r"text_config\.eos_token_id: .*, got \[True\]"),
        ({"architectures": 5}, "architectures: Input should be a valid list, got 5"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps: .*, got inf"),
        ({"rms_norm_eps": {"__float__": "Infinity"}}, "rms_norm_eps: .*, got inf"),
        ({"rope_theta": math.nan}, "rope_theta: .*, got nan"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: .* got 'no'"),
        ({"rope_scaling": 5}, "rope_scaling: .*, got 5"),
        ({"vision_config": {"num_hidden_layers": 2**31}}, r"vision_config\.num_hidden_layers is 2147483648"),
        ({"rope_scaling": {"type": "yarn", "factor": math.inf}}, r"rope_scaling\.factor: .* finite number, got inf"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": math.nan}}},
            r"rope_parameters\.full_attention\.rope_theta: .* finite number, got nan",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0, math.inf]}},
            r"rope_scaling\.short_factor: .*, got inf",
        ),
        ({"partial_rotary_factor": -1}, "partial_rotary_factor: .* greater than 0, got -1"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: .* less than or equal to 1, got 1.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0}}, r"rope_parameters\.partial_rotary_factor: .*, got 0"),
        ({"text_config": {"hidden_size": 2**31}}, r"text_config\.hidden_size is 2147483648"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_value_that_the_tensors_do_not_bear_out_is_refused(
    changed: Callable[..., Path], values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=f"the config of .* cannot be used: .*{words}"):
        start(changed(**values))


def test_the_same_goes_for_overrides(llama: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": math.inf}
    with pytest.raises(ModelError, match=r"rope_\w+\.factor: Input should be a finite number, got inf"):
        start(llama, hf_overrides={"rope_scaling": scaling})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layer_types": ["foo"]}, "layer_types holds 'foo'; known here are full_attention, sliding_attention"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": 5}}, "config_groups must be"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": 5}}}},
            r"config_groups\.weights must be a mapping, got 5",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": "x"}},
            "group_size must be an integer",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 0}}, "group_size must be 1 or more"),
        ({"quantization_config": {"quant_method": "awq", "bits": [4]}}, "bits must be an integer, got"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 0]}},
            r"weight_block_size must be two integers above 0, got \[0, 0\]",
        ),
    ],
    ids=lambda value: str(value)[:70],
)
def test_a_value_that_no_plugin_can_read_is_named(
    changed: Callable[..., Path], values: dict[str, Any], words: str
) -> None:
    path = changed(**values)
    refused = explain(load_config({"model": {"path": str(path), "tokenizer_mode": "none"}})).refusal
    with pytest.raises(ModelError, match=words) as raised:
        start(path)
    assert isinstance(refused, ModelError)
    assert str(refused) == str(raised.value)


@pytest.mark.parametrize("dtype", ["float9", ["a"]])
def test_a_dtype_that_there_is_not_is_named(changed: Callable[..., Path], dtype: object) -> None:
    path = changed(torch_dtype=dtype, dtype=None)
    with pytest.raises(ModelError, match=r"names the torch_dtype .* which is none; set model\.dtype"):
        start(path, dtype="auto")
    assert start(path).generate(PROMPT, GREEDY, use_tqdm=False)


def test_an_end_of_sequence_outside_the_vocabulary_is_left_out_with_a_warning(changed: Callable[..., Path]) -> None:
    path = changed(eos_token_id=[10**9, -5, 7])
    warnings = explain(load_config({"model": {"path": str(path), "tokenizer_mode": "none"}})).warnings
    assert [text for text in warnings if "eos_token_id 1000000000, -5 of the model's config is no token" in text]
    llm = start(path)
    assert llm.engine.config.model.eos_token_ids == (7,)
    kept = SamplingParams(temperature=0, max_tokens=6, min_tokens=6)
    assert len(llm.generate(PROMPT, kept, use_tqdm=False)[0].outputs[0].token_ids) == 6


def test_more_weights_than_are_stored_are_refused_before_they_are_allocated(changed: Callable[..., Path]) -> None:
    table = torch.zeros(1, 2**20)  # a long side, for the sizes to hide behind
    with pytest.raises(ModelError, match=r"it asks for [\d,]+ weights, and the checkpoint has"):
        start(changed({"long": table}, hidden_size=2**20, intermediate_size=2**20, vocab_size=2**20))


SIZES = st.sampled_from([-1, 0, 1, 3, 63, 128, 10**4, 2**31, 2**63, 10**30])
ODD = st.one_of(
    SIZES,
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-2, 200), max_size=2),
    st.dictionaries(
        st.sampled_from(["rope_type", "factor", "type", "__float__"]), st.one_of(SIZES, st.text(max_size=3))
    ),
)
KEYS = (
    *("architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    *("rope_scaling", "rope_parameters", "hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias", "dtype"),
    *("eos_token_id", "bos_token_id", "sliding_window", "layer_types", "text_config", "quantization_config"),
    *("is_encoder_decoder", "partial_rotary_factor", "original_max_position_embeddings", "num_experts"),
)


@example(values={"hidden_act": ""})
@example(values={"partial_rotary_factor": 1e-5})
@example(values={"partial_rotary_factor": 0.2})
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.sampled_from(KEYS), ODD, min_size=1, max_size=2))
def test_any_config_loads_or_is_refused(llama: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    path = write(llama, tmp_path, values)
    # Whatever else is raised, or a run that does not end, is a failure.
    with contextlib.suppress(DovetailError), start(path) as llm:
        llm.generate([PROMPT], GREEDY)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2"])
def test_a_stored_output_layer_that_differs_is_used_as_transformers_does(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_tiny_model(tmp_path, tiny_config(model_type, tie_word_embeddings=False), seed=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    oracle: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    expected = oracle.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    with start(tmp_path) as llm:
        found = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    assert list(found) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("name", ["vision_tower.blocks.0.weight", "model.layers.7.mlp.up_proj.weight"])
def test_tensors_beside_the_model_are_left_out_with_a_warning(
    llama: Path, changed: Callable[..., Path], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with start(llama) as llm:
        expected = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    with start(changed({name: torch.ones(2, 3)})) as llm:
        assert llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == expected
    assert f"that are no part of the model are left out (1): {name} [2, 3]" in caplog.text


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.q_norm.weight", "lm_head.bias"]
)
def test_tensors_within_a_layer_that_does_not_take_them_are_refused(changed: Callable[..., Path], name: str) -> None:
    with pytest.raises(ModelError, match=rf"not expected \(1\): {name}"):
        start(changed({name: torch.ones(64)}))
