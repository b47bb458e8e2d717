"""Checkpoints with a score head, against transformers' ForSequenceClassification."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, PoolingParams
from dovetail.contracts.errors import ConfigError, ModelError, RequestError
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

PROMPTS = [[(7 * i + s) % 120 for i in range(length)] for s, length in ((0, 20), (3, 1), (5, 33))]


def save_scoring_model(directory: Path, num_labels: int, model_type: str = "llama") -> Any:
    """Writes a random decoder with a score head, and returns transformers' model."""
    from transformers import AutoModelForSequenceClassification

    config = tiny_config(model_type, num_labels=num_labels, pad_token_id=0)
    model: Any = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    return model


def every_score(model: Any, prompt: list[int]) -> torch.Tensor:
    """[tokens, labels], before the activation: the head over each state."""
    with torch.no_grad():
        scores: torch.Tensor = model.score(model.model(torch.tensor([prompt])).last_hidden_state)[0]
    return scores


@pytest.mark.parametrize(("model_type", "num_labels"), [("llama", 3), ("llama", 2), ("qwen3", 1)])
def test_probabilities_are_those_of_transformers(
    model_type: str, num_labels: int, tmp_path: Path, make_llm: Callable[..., LLM]
) -> None:
    model = save_scoring_model(tmp_path, num_labels, model_type)
    llm = make_llm(model={"path": str(tmp_path)}, scheduler={"max_num_batched_tokens": 7, "max_num_seqs": 4})
    raw = llm.classify(PROMPTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    for prompt, scores, output in zip(PROMPTS, raw, llm.classify(PROMPTS, use_tqdm=False), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt))).logits[0]
        if prompt[-1] != 0:
            torch.testing.assert_close(torch.tensor(scores.outputs.probs), logits, rtol=0, atol=1e-5)
        expected = every_score(model, prompt)[-1]
        expected = expected.sigmoid() if num_labels == 1 else expected.softmax(-1)
        torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, rtol=0, atol=1e-5)
        assert output.outputs.num_classes == num_labels


def test_rewards_are_the_scores_of_all_tokens(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    model = save_scoring_model(tmp_path, 1)
    llm = make_llm(model={"path": str(tmp_path)})
    params = PoolingParams(use_activation=False)
    for prompt, output in zip(PROMPTS, llm.reward(PROMPTS, pooling_params=params, use_tqdm=False), strict=True):
        torch.testing.assert_close(output.outputs.data, every_score(model, prompt), rtol=0, atol=1e-5)


def test_one_label_scores_pairs_as_a_cross_encoder(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    model = save_scoring_model(tmp_path, 1)
    llm = make_llm(model={"path": str(tmp_path)})
    scores = [o.outputs.score for o in llm.score(PROMPTS[0], PROMPTS[1:], use_tqdm=False)]
    expected = [every_score(model, PROMPTS[0] + other)[-1].sigmoid().item() for other in PROMPTS[1:]]
    assert scores == pytest.approx(expected, abs=1e-5)


def test_a_model_that_scores_embeds_and_does_not_generate(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    save_scoring_model(tmp_path, 3)
    llm = make_llm(model={"path": str(tmp_path)})
    assert llm.embed(PROMPTS[0], use_tqdm=False)[0].outputs.hidden_size == 64
    with pytest.raises(RequestError, match="a score head in place of an output layer"):
        llm.generate(PROMPTS[0], use_tqdm=False)
    with pytest.raises(RequestError, match="dimensions is for embeddings"):
        llm.classify(PROMPTS[0], pooling_params=PoolingParams(dimensions=2), use_tqdm=False)


def test_scores_come_back_from_sleep(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    save_scoring_model(tmp_path, 3)
    llm = make_llm(model={"path": str(tmp_path)})
    before = [o.outputs.probs for o in llm.classify(PROMPTS, use_tqdm=False)]
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert [o.outputs.probs for o in llm.classify(PROMPTS, use_tqdm=False)] == before


def test_a_head_that_is_not_there_is_missed(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    from safetensors.torch import load_file, save_file

    save_scoring_model(tmp_path, 3)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    weight = tensors.pop("score.weight")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks score\.weight"):
        make_llm(model={"path": str(tmp_path)})
    save_file({**tensors, "score.weight": weight[:2].clone()}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"score\.weight has shape \[2, 64\], and the config implies \[3, 64\]"):
        make_llm(model={"path": str(tmp_path)})


def test_a_named_pooler_of_labels_needs_a_head(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    save_tiny_model(tmp_path, tiny_config("llama"))
    with pytest.raises(ConfigError, match="the checkpoint has no score head"):
        make_llm(model={"path": str(tmp_path)}, pooling={"classify": "classify"})


def test_an_update_brings_the_head_too(tmp_path: Path, make_llm: Callable[..., LLM]) -> None:
    save_scoring_model(tmp_path, 3)
    llm = make_llm(model={"path": str(tmp_path)}, weight_transport="in_process")
    old = [o.outputs.probs for o in llm.classify(PROMPTS, use_tqdm=False)]
    model = save_scoring_model(tmp_path / "new", 3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    weights = model.state_dict()
    llm.init_weight_transfer_engine()
    for change in ({"score.weight": torch.ones(2, 64)}, {"score.weight": None}):
        wrong = {name: tensor for name, tensor in (weights | change).items() if tensor is not None}
        llm.start_weight_update()
        llm.update_weights({"weights": wrong})
        with pytest.raises(ModelError, match=r"score\.weight"):
            llm.finish_weight_update()
        assert [o.outputs.probs for o in llm.classify(PROMPTS, use_tqdm=False)] == old
    for part, partial in ((weights, False), ({"score.weight": weights["score.weight"]}, True)):
        llm.start_weight_update(partial=partial)
        llm.update_weights({"weights": part})
        llm.finish_weight_update()
        for prompt, output in zip(PROMPTS, llm.classify(PROMPTS, use_tqdm=False), strict=True):
            expected = every_score(model, prompt)[-1].softmax(-1)
            torch.testing.assert_close(torch.tensor(output.outputs.probs), expected, rtol=0, atol=1e-5)
