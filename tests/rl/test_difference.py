"""How far an engine is from a trainer: transformers, known offsets, and the engine itself."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import LLM, RequestOutput, SamplingParams
from dovetail.rl.difference import engine_log_probs, logprob_difference, transformers_log_probs
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

PROMPTS = [[5, 6, 7], list(range(20, 45)), [9]]
RAW = SamplingParams(seed=3, max_tokens=12, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(directory, transformers model in float32)"""
    directory = tmp_path_factory.mktemp("tiny")
    return directory, save_tiny_model(directory, tiny_config("llama"))


@pytest.fixture(scope="module")
def make_llm(tiny: tuple[Path, Any]) -> Iterator[Callable[..., LLM]]:
    created: list[LLM] = []

    def make(**given: Any) -> LLM:
        model = {"path": str(tiny[0]), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 128}
        created.append(LLM(model=model, cache={"num_blocks": 100}, executor={"threads": 1}, **given))
        return created[-1]

    yield make
    for llm in created:
        llm.shutdown()


@pytest.fixture(scope="module")
def outputs(make_llm: Callable[..., LLM]) -> list[RequestOutput]:
    return make_llm().generate(PROMPTS, RAW)


def shifted(
    outputs: list[RequestOutput], offsets: list[float]
) -> Callable[[Sequence[int], Sequence[int]], list[float]]:
    """A trainer that differs by known numbers, which go on from one sequence to the next."""
    rest = iter(offsets)
    entries = {tuple(output.prompt_token_ids): output.outputs[0].logprobs or [] for output in outputs}

    def log_probs(prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        positions = entries[tuple(prompt)]
        return [at[token].logprob + next(rest) for token, at in zip(output, positions, strict=True)]

    return log_probs


def test_the_numbers_of_known_differences(outputs: list[RequestOutput]) -> None:
    offsets = [0.0] * 36
    offsets[3], offsets[14], offsets[20] = 0.5, -1.0, 0.1
    found = logprob_difference(outputs, shifted(outputs, offsets), clip=0.2)
    ratios = [math.exp(offset) for offset in offsets]
    assert (found.num_sequences, found.num_tokens, found.worst) == (3, 36, (1, 2))
    assert found.mean == pytest.approx(1.6 / 36)
    assert (found.max, found.bias) == (pytest.approx(1.0), pytest.approx(-0.4 / 36))
    assert 0.5 < found.p99 < 1.0
    assert found.kl == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 36)
    assert found.ratio_mean == pytest.approx(sum(ratios) / 36)
    assert (found.ratio_min, found.ratio_max) == (pytest.approx(math.exp(-1)), pytest.approx(math.exp(0.5)))
    assert found.clipped == pytest.approx(2 / 36)
    assert found.effective == pytest.approx(sum(ratios) ** 2 / (36 * sum(r * r for r in ratios)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("far", "largest", "effective"), [(2000.0, math.exp(600), 1 / 36), (-2000.0, 1.0, 35 / 36)])
def test_numbers_are_finite_however_far_off_a_trainer_is(
    outputs: list[RequestOutput], far: float, largest: float, effective: float
) -> None:
    found = logprob_difference(outputs, shifted(outputs, [far] + [0.0] * 35))
    assert found.ratio_max == pytest.approx(largest)
    assert found.effective == pytest.approx(effective)
    assert all(math.isfinite(number) for number in (found.kl, found.ratio_mean, found.bias, found.max))
    all_far = logprob_difference(outputs, shifted(outputs, [far] * 36))
    assert (all_far.effective, all_far.clipped) == (pytest.approx(1), 1)


def test_the_table_has_every_number(outputs: list[RequestOutput]) -> None:
    table = logprob_difference(outputs, shifted(outputs, [0.0] * 35 + [0.5])).table()
    lines = dict(line.split("  ", 1) for line in table.splitlines())
    assert lines["|difference| max"].strip() == "0.5 (token 11 of sequence 2)"
    assert lines["tokens"].strip(" ") == "36"
    assert len(lines) == 11


def test_raw_ones_are_those_of_transformers(outputs: list[RequestOutput], tiny: tuple[Path, Any]) -> None:
    found = logprob_difference(outputs, transformers_log_probs(tiny[1]))
    assert found.max < 1e-4
    assert found.kl < 1e-8
    assert found.clipped == 0


def test_processed_ones_are_compared_without_their_truncation(
    make_llm: Callable[..., LLM], tiny: tuple[Path, Any]
) -> None:
    params = SamplingParams(
        seed=3, max_tokens=12, temperature=0.7, top_p=0.6, logprobs=0, logprobs_mode="processed_logprobs"
    )
    outputs = make_llm().generate(PROMPTS, params)
    assert logprob_difference(outputs, transformers_log_probs(tiny[1], temperature=0.7)).max < 1e-4
    assert logprob_difference(outputs, transformers_log_probs(tiny[1])).max > 0.05


def test_other_weights_show(outputs: list[RequestOutput], tiny: tuple[Path, Any]) -> None:
    other = copy.deepcopy(tiny[1])
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.05)
    found = logprob_difference(outputs, transformers_log_probs(other))
    assert found.mean > 1e-3
    assert found.effective < 1


def test_decoding_and_prefill_are_the_same_bits_under_strict(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(reproducibility="strict")
    found = logprob_difference(llm.generate(PROMPTS, RAW), engine_log_probs(llm))
    assert (found.num_tokens, found.max, found.kl, found.ratio_min, found.ratio_max) == (36, 0.0, 0.0, 1.0, 1.0)


def test_what_cannot_be_compared_is_refused(make_llm: Callable[..., LLM], outputs: list[RequestOutput]) -> None:
    llm = make_llm()
    silent = llm.generate([[5, 6]], SamplingParams(max_tokens=2))
    processed = llm.generate([[5, 6]], SamplingParams(max_tokens=2, logprobs=0, logprobs_mode="processed_logprobs"))
    with pytest.raises(ValueError, match="no output tokens"):
        logprob_difference([], lambda prompt, output: [])
    with pytest.raises(ValueError, match=r"SamplingParams\(logprobs=0\)"):
        logprob_difference(silent, lambda prompt, output: [])
    with pytest.raises(ValueError, match="compare them apart"):
        logprob_difference([*outputs, *processed], lambda prompt, output: [])
    with pytest.raises(ValueError, match="12 output tokens of sequence 0"):
        logprob_difference(outputs, lambda prompt, output: [0.0])
    with pytest.raises(ValueError, match="token 0 of sequence 0 is nan"):
        logprob_difference(outputs, lambda prompt, output: [math.nan] * len(output))
