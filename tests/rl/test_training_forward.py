"""The training pass of an engine: its log probabilities are the engine's bits, its gradients those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, RequestOutput, SamplingParams
from dovetail.contracts.errors import ConfigError, ModelError, RequestError
from dovetail.rl.difference import LogprobDifference, logprob_difference
from dovetail.rl.training_forward import TrainingForward
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

PROMPTS = [[5, 6, 7], list(range(20, 45)), [9]]
RAW = SamplingParams(seed=3, max_tokens=12, ignore_eos=True, logprobs=0)


def keywords(folder: Path, **given: Any) -> dict[str, Any]:
    model = {"path": str(folder), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 64}
    model |= given.pop("model", {})
    return {"model": model, "cache": {"num_blocks": 40}, "reproducibility": "strict"} | given


def difference(outputs: list[RequestOutput], training: TrainingForward, temperature: float = 1) -> LogprobDifference:
    def trainer(prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        return training.log_probs([(prompt, output)], temperature=temperature)[0].tolist()

    return logprob_difference(outputs, trainer)


def loss(outputs: list[RequestOutput], log_probs: list[torch.Tensor]) -> torch.Tensor:
    """Other weights for each token, so that no gradient is a plain sum."""
    return sum((one * torch.arange(1.0, 1 + len(one))).sum() for one in log_probs)  # type: ignore[return-value]


def scored(outputs: list[RequestOutput]) -> list[tuple[Sequence[int], Sequence[int]]]:
    return [(output.prompt_token_ids or [], output.outputs[0].token_ids) for output in outputs]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    return {name: grad for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param("llama", "float32", id="llama"),
        pytest.param("llama", "bfloat16", id="llama-bfloat16"),
        pytest.param("phi3", "float32", id="phi3: fused in the checkpoint"),
        pytest.param("gemma2", "float32", id="gemma2: windows, caps, norms with an offset"),
        pytest.param("mixtral", "float32", id="mixtral: experts"),
    ],
)
def test_the_difference_is_zero_and_gradients_are_those_of_transformers(tmp_path: Path, kind: str, dtype: str) -> None:
    model = save_tiny_model(tmp_path, tiny_config(kind))
    with LLM(**keywords(tmp_path, model={"dtype": dtype})) as llm:
        outputs = llm.generate(PROMPTS, RAW)
        training = TrainingForward(llm.engine.config)
    training.load(model.named_parameters())
    found = difference(outputs, training)
    assert (found.num_tokens, found.max, found.ratio_min, found.ratio_max) == (36, 0.0, 1.0, 1.0)
    loss(outputs, training.log_probs(scored(outputs))).backward()
    ours = gradients(model)
    loss(outputs, [of_transformers(model, *one) for one in scored(outputs)]).backward()
    theirs = gradients(model)
    assert ours.keys() == theirs.keys()
    bound = 1e-4 if dtype == "float32" else 0.2
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= bound * gradient.norm(), name


def of_transformers(model: Any, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *output]])
    rows = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(1, ids[0, len(prompt) :, None])[:, 0]  # type: ignore[no-any-return]


def test_the_difference_stays_zero_while_weights_are_trained_and_updated(tmp_path: Path) -> None:
    """At a temperature, without truncation, as rollouts are drawn."""
    model = save_tiny_model(tmp_path, tiny_config("llama"))
    given = keywords(tmp_path, weight_transport="in_process")
    training = TrainingForward.from_config(**given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    params = SamplingParams(
        seed=5, temperature=0.7, max_tokens=12, ignore_eos=True, logprobs=0, logprobs_mode="processed_logprobs"
    )
    with LLM(**given) as llm:
        llm.init_weight_transfer_engine()
        for step in range(3):
            outputs = llm.generate(PROMPTS, params)
            assert outputs[0].weight_version == step
            training.load(model.named_parameters())
            assert difference(outputs, training, temperature=0.7).max < 1e-6  # one subtraction more in the engine
            raw = llm.generate(PROMPTS, RAW)
            assert difference(raw, training).max == 0
            optimizer.zero_grad()
            loss(outputs, training.log_probs(scored(outputs))).neg().backward()
            optimizer.step()
            llm.start_weight_update()
            llm.update_weights({"weights": model.state_dict()})
            llm.finish_weight_update()


def test_parameters_that_were_not_loaded_again_are_the_old_ones(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, tiny_config("llama"))
    training = TrainingForward.from_config(**keywords(tmp_path))
    training.load(model.named_parameters())
    before = training.log_probs([([5, 6], [7])])[0].item()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    assert training.log_probs([([5, 6], [7])])[0].item() == before
    training.load(model.named_parameters())
    assert training.log_probs([([5, 6], [7])])[0].item() != before


@pytest.mark.parametrize(
    ("kind", "given", "error", "said"),
    [
        ("llama", {"reproducibility": "default"}, ConfigError, "reproducibility: strict"),
        ("llama", {"quantization": "q8"}, ConfigError, "quantization 'q8' rounds the weights"),
        ("llama4_text", {}, ModelError, "no gradients are known of chunked attention"),
    ],
)
def test_what_has_no_equal_bits_or_no_gradient_is_refused(
    tmp_path: Path, kind: str, given: dict[str, Any], error: type[Exception], said: str
) -> None:
    save_tiny_model(tmp_path, tiny_config(kind))
    with pytest.raises(error, match=said):
        TrainingForward.from_config(**keywords(tmp_path, **given))


def test_sequences_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, tiny_config("llama"))
    training = TrainingForward.from_config(**keywords(tmp_path))
    with pytest.raises(ModelError, match="call load"):
        training.log_probs([([5], [6])])
    with pytest.raises(ModelError, match="missing"):
        training.load(list(model.named_parameters())[:-1])
    with pytest.raises(ModelError, match="call load"):
        training.log_probs([([5], [6])])
    training.load(model.named_parameters())
    for prompt, output in (([], [6]), ([5] * 60, [6] * 5)):
        with pytest.raises(RequestError, match="at least one of the prompt, and 64 together at most"):
            training.log_probs([(prompt, output)])
    with pytest.raises(RequestError, match=r"0 \.\. 127"):
        training.log_probs([([5], [128])])
    assert training.log_probs([([5], [])])[0].shape == (0,)
