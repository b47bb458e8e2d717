"""Models that are cut into stages: what each holds, takes and refuses."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import ModelFamily, ModelInputs
from dovetail.nn import expected_shapes
from dovetail.nn.planning import planning_context
from dovetail.plugins.model_families.deepseek import DeepseekFamily
from dovetail.plugins.model_families.gemma import GemmaFamily
from dovetail.plugins.model_families.layernorm import LayerNormFamily
from dovetail.plugins.model_families.llama import LlamaFamily
from dovetail.plugins.model_families.llama4 import Llama4Family
from dovetail.plugins.model_families.moe import MoEFamily
from dovetail.testing.model_harness import ModelHarness
from dovetail.testing.plain_attention import PlainAttention
from dovetail.testing.tiny_models import tiny_config, tiny_model
from dovetail.worker.forward import compiled, model_pass

FAMILIES: dict[str, type[ModelFamily]] = {
    "llama": LlamaFamily,
    "gemma3_text": GemmaFamily,
    "mixtral": MoEFamily,
    "llama4_text": Llama4Family,
    "deepseek_v3": DeepseekFamily,
    "bloom": LayerNormFamily,
}


def checkpoint(model_type: str, **overrides: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    model = tiny_model(tiny_config(model_type, **overrides))
    return {**model.config.to_dict(), "architectures": [type(model).__name__]}, dict(model.state_dict())


def stage(model_type: str, config: dict[str, Any], layers: range, *, is_first: bool, is_last: bool) -> dict[str, Any]:
    family = FAMILIES[model_type]
    context = replace(planning_context(), layers=layers, is_first_stage=is_first, is_last_stage=is_last)
    module: Any = family(family.Options()).create(config, context)
    return expected_shapes(module)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_tensor_belongs_to_one_stage(model_type: str, is_tied: bool) -> None:
    """But for the table of a tied output layer, which the first and the last stage need."""
    config, _ = checkpoint(model_type, tie_word_embeddings=is_tied)
    whole = stage(model_type, config, range(2), is_first=True, is_last=True)
    parts = [
        stage(model_type, config, range(1), is_first=True, is_last=False),
        stage(model_type, config, range(1, 1), is_first=False, is_last=False),
        stage(model_type, config, range(1, 2), is_first=False, is_last=True),
    ]
    assert parts[0] | parts[1] | parts[2] == whole
    assert parts[1] == {}
    assert set(parts[0]) & set(parts[2]) == ({"model.embed_tokens.weight"} if is_tied else set())


def harness(**settings: Any) -> ModelHarness:
    config, weights = checkpoint("llama", num_hidden_layers=3)
    return ModelHarness(LlamaFamily(LlamaFamily.Options()), config, weights.items(), PlainAttention, **settings)


def test_tensors_of_other_stages_are_passed_over_silently(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    last = harness(layers=range(2, 3), is_first_stage=False)
    assert caplog.messages == []
    last.model.load_weights([("model.layers.0.mlp.up_proj.weight", torch.zeros(96, 64))], partial=True)
    for name in ("model.layers.3.mlp.up_proj.weight", "model.layers.2.mlp.side_proj.weight"):
        with pytest.raises(ModelError, match=name):
            last.model.load_weights([(name, torch.zeros(96, 64))], partial=True)


@torch.inference_mode()
def test_each_stage_gives_the_states_between_its_own_layers() -> None:
    whole, first, last = (
        harness(),
        harness(layers=range(2), is_last_stage=False),
        harness(layers=range(2, 3), is_first_stage=False),
    )
    prompt = [5, 9, 3, 70]
    inputs = replace(whole.plan([(0, prompt, 0)]), layers=(1, 2, 3))
    expected = whole.model.forward(inputs).layer_states
    first.plan([(0, prompt, 0)])
    one = first.model.forward(inputs)
    last.plan([(0, prompt, 0)])
    other = last.model.forward(replace(inputs, input_ids=None, stage_input=one.hidden.clone()))
    assert expected is not None
    assert one.layer_states is not None
    assert other.layer_states is not None
    torch.testing.assert_close(torch.cat((one.layer_states, other.layer_states), dim=1), expected)


IDS = torch.tensor([3, 4])


@pytest.mark.parametrize(
    ("settings", "given", "reason"),
    [
        ({}, {}, "takes either ModelInputs.input_ids or ModelInputs.embeddings"),
        ({}, {"input_ids": IDS, "embeddings": torch.zeros(2, 64)}, "takes either"),
        ({"layers": range(1, 3), "is_first_stage": False}, {"input_ids": IDS}, "needs ModelInputs.stage_input"),
        ({}, {"input_ids": IDS, "positions": torch.zeros(3, 2, dtype=torch.int64)}, "positions are given for 3"),
        ({}, {"input_ids": IDS, "adapters": "pirate"}, r"without ModelContext\.adapters"),
    ],
)
def test_inputs_of_another_stage_or_kind_are_refused(settings: Any, given: Any, reason: str) -> None:
    model = harness(**settings).model
    with pytest.raises(ModelError, match=reason):
        model.forward(ModelInputs(**{"positions": torch.arange(2)} | given))


def test_what_a_stage_does_not_hold_is_refused() -> None:
    with pytest.raises(ModelError, match="only the last stage of a model computes logits"):
        harness(layers=range(1), is_last_stage=False).model.compute_logits(torch.zeros(1, 64))
    with pytest.raises(ModelError, match="only the first stage of a model embeds tokens"):
        harness(layers=range(1, 3), is_first_stage=False).model.embed(IDS)
    with pytest.raises(ModelError, match=r"is to hold the layers 1 \.\. 3, and the model has 3"):
        harness(layers=range(1, 4), is_first_stage=False)


@pytest.mark.nightly  # torch compiles for half a minute
@torch.inference_mode()
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_pass_gives_what_the_model_gives() -> None:
    """The records of the contract are made inside what is compiled."""
    layers = (0, 2)
    runner = harness()
    inputs = runner.plan([(0, [5, 9, 3, 70], 0)])
    assert inputs.input_ids is not None
    expected = model_pass(runner.model, layers)(inputs.input_ids, inputs.positions)
    passed = compiled(runner.model, model_pass(runner.model, layers), "default")(inputs.input_ids, inputs.positions)
    torch.testing.assert_close(passed, expected)
