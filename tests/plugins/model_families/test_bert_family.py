"""BERT and RoBERTa against transformers, on random checkpoints in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.attention_backends.reference import ReferenceBackend
from dovetail.attention_backends.sdpa import SDPABackend
from dovetail.contracts.attention import AttentionBackend
from dovetail.contracts.errors import ModelError
from dovetail.contracts.model import Communicator, ModelNeed, ScoresStates
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment
from dovetail.nn.planning import against_size
from dovetail.plugins.model_families.bert import BertFamily
from dovetail.testing.model_harness import ModelHarness
from dovetail.testing.thread_ranks import run_in_threads
from dovetail.testing.tiny_encoders import save_tiny_encoder
from dovetail.testing.tiny_models import read_config, read_weights

PROMPTS = [[2, 17, 90, 33, 3], [5], list(range(40, 71)), [9, 8, 7, 6, 5]]
Encoder = tuple[dict[str, Any], dict[str, torch.Tensor], Any]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Encoder]:
    """encoder("bert", ...): config, weights and the transformers model; equal arguments give the same one."""
    made: dict[str, Encoder] = {}

    def make(model_type: str = "bert", **overrides: Any) -> Encoder:
        key = f"{model_type} {sorted(overrides.items())}"
        if key not in made:
            directory: Path = tmp_path_factory.mktemp(model_type)
            oracle = save_tiny_encoder(directory, model_type, **overrides)
            made[key] = read_config(directory), dict(read_weights(directory)), oracle
        return made[key]

    return make


def harness(encoder: Encoder, backend: type[AttentionBackend] = SDPABackend, **settings: Any) -> ModelHarness:
    config, weights, _ = encoder
    return ModelHarness(BertFamily(BertFamily.Options()), config, weights.items(), backend, **settings)


def states(model: ModelHarness, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Of each prompt, all computed in one step."""
    hidden = model.step([(number, prompt, 0) for number, prompt in enumerate(prompts)])
    return list(hidden.split([len(prompt) for prompt in prompts]))


def expected(oracle: Any, prompt: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        hidden: torch.Tensor = oracle(torch.tensor([list(prompt)])).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("backend", [ReferenceBackend, SDPABackend])
@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("bert", {}),
        ("bert", {"hidden_act": "gelu_new", "num_attention_heads": 2, "type_vocab_size": 1}),
        ("roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
        ("xlm-roberta", {"pad_token_id": 1}),
    ],
)
def test_states_equal_those_of_transformers(
    encoder: Any, backend: type[AttentionBackend], model_type: str, overrides: dict[str, Any]
) -> None:
    """Prompts of several lengths in one step."""
    one = encoder(model_type, **overrides)
    for actual, prompt in zip(states(harness(one, backend), PROMPTS), PROMPTS, strict=True):
        torch.testing.assert_close(actual, expected(one[2], prompt), rtol=0, atol=2e-5)


def test_token_types_tell_the_texts_of_a_pair_apart(encoder: Any) -> None:
    """The second prompt of the step is no pair."""
    one, types = encoder(), [0, 0, 1, 1, 1]
    model = harness(one)
    inputs = model.plan([(0, PROMPTS[0], 0), (1, PROMPTS[3], 0)])
    with torch.inference_mode():
        hidden = model.model.forward(replace(inputs, token_types=torch.tensor(types + [0] * 5))).hidden
        pair = one[2](torch.tensor([PROMPTS[0]]), token_type_ids=torch.tensor([types])).last_hidden_state[0]
    torch.testing.assert_close(hidden[:5], pair, rtol=0, atol=2e-5)
    torch.testing.assert_close(hidden[5:], expected(one[2], PROMPTS[3]), rtol=0, atol=2e-5)


def test_a_prompt_is_what_it_is_alone(encoder: Any) -> None:
    model = harness(encoder())
    together = states(model, PROMPTS)
    for actual, prompt in zip(together, PROMPTS, strict=True):
        torch.testing.assert_close(actual, states(model, [prompt])[0], rtol=0, atol=2e-6)


def test_a_prompt_has_the_same_bits_in_any_batch(encoder: Any) -> None:
    """In strict mode, over a backend that declares it."""
    model = harness(encoder(), ReferenceBackend, batch_invariant=True)
    for actual, prompt in zip(states(model, PROMPTS), PROMPTS, strict=True):
        assert torch.equal(actual, states(model, [prompt])[0])


@pytest.mark.parametrize("tensor_parallel", [2, 4])
def test_ranks_together_equal_transformers(encoder: Any, tensor_parallel: int) -> None:
    one = encoder()

    def work(communicator: Communicator) -> list[torch.Tensor]:
        return states(harness(one, communicator=communicator), PROMPTS)

    for of_rank in run_in_threads(tensor_parallel, work):
        for actual, prompt in zip(of_rank, PROMPTS, strict=True):
            torch.testing.assert_close(actual, expected(one[2], prompt), rtol=0, atol=2e-5)


def test_the_size_is_that_of_the_model(encoder: Any) -> None:
    """transformers counts the pooler's weights as well, which are left out here."""
    one = encoder("roberta", pad_token_id=1)
    config, weights, _ = one
    size, model = BertFamily(BertFamily.Options()).size(config), harness(one)
    assert size.is_encoder
    assert size.num_parameters == sum(one.numel() for name, one in weights.items() if not name.startswith("pooler"))
    assert size.max_model_len == config["max_position_embeddings"] - 2
    assert against_size("bert", size, model.model, model.context) == []
    assert against_size("bert", replace(size, is_encoder=False), model.model, model.context) == [
        "the model family bert says is_encoder False, and builds a model of True: correct its size()"
    ]


@pytest.mark.parametrize(("model_type", "labels"), [("bert", 1), ("roberta", 3)])
def test_scores_equal_those_of_transformers(encoder: Any, model_type: str, labels: int) -> None:
    one = encoder(model_type, num_labels=labels, pad_token_id=1)
    model = harness(one)
    assert BertFamily(BertFamily.Options()).size(one[0]).num_labels == labels
    assert isinstance(model.model, ScoresStates)
    for actual, prompt in zip(states(model, PROMPTS), PROMPTS, strict=True):
        with torch.no_grad():
            scores = one[2](torch.tensor([prompt])).logits
        torch.testing.assert_close(model.model.score(actual[:1]), scores, rtol=0, atol=2e-5)


def test_names_of_older_checkpoints(encoder: Any) -> None:
    """A prefix of the whole model, and TensorFlow's names of a norm's parts."""
    config, weights, oracle = encoder()
    renamed = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): one
        for name, one in weights.items()
    }
    (actual,) = states(harness((config, renamed, oracle)), PROMPTS[:1])
    torch.testing.assert_close(actual, expected(oracle, PROMPTS[0]), rtol=0, atol=2e-5)


def test_an_encoder_has_no_logits(encoder: Any) -> None:
    with pytest.raises(ModelError, match=r"it has no logits, and generates nothing; ask for embeddings"):
        harness(encoder()).model.compute_logits(torch.zeros(1, 64))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_decoder": True}, "the family builds encoders"),
        ({"position_embedding_type": "relative_key"}, "positions are added to the embeddings"),
        ({"num_attention_heads": 5}, "does not divide by 5 heads"),
    ],
)
def test_check_says_why_not(encoder: Any, changes: dict[str, Any], reason: str) -> None:
    need = ModelNeed(config=encoder()[0] | changes, tensor_parallel=1, device_type="cpu", dtype="float32")
    environment = Environment("cpu", num_cpus=1, memory_bytes=1 << 30)
    (answer,) = reasons_against(BertFamily, need, BertFamily.Options(), environment)
    assert reason in answer


def test_adapters_and_stages_are_refused(encoder: Any) -> None:
    need = ModelNeed(
        config=encoder()[0],
        tensor_parallel=1,
        device_type="cpu",
        dtype="float32",
        adapters=True,
        pipeline_parallel=2,
    )
    environment = Environment("cpu", num_cpus=1, memory_bytes=1 << 30)
    reasons = reasons_against(BertFamily, need, BertFamily.Options(), environment)
    assert ["2 stages" in reason or "applies no adapters" in reason for reason in reasons] == [True, True]
