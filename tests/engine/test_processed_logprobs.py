"""Processed log probabilities: those of the distribution that tokens are drawn from, with the mass that the truncation
left, so that a trainer that truncates nothing can compare. The oracle is transformers in float64."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, RequestOutput, SamplingParams
from dovetail.contracts.errors import ConfigError, RequestError

PROMPT = [5, 6, 7, 8] * 6
TRUNCATED = {"temperature": 1.6, "top_k": 30, "top_p": 0.8, "min_p": 0.02}
NARROW = {"temperature": 0.5, "top_k": 4, "top_p": 0.95}
"""Guesses are accepted often enough."""
LOOKUP = {"drafters": {"it": {"name": "ngram", "min_match": 1, "num_tokens": 3, "length": "fixed"}}}

Logits = Callable[[list[int]], Any]


@pytest.fixture(scope="module")
def logits(tiny_llama: tuple[Path, Any]) -> Logits:
    """float64 [len(ids), vocab_size]: of the token after each position, by transformers."""
    import torch

    model = copy.deepcopy(tiny_llama[1]).double()

    def logits_of(ids: list[int]) -> Any:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0]

    return logits_of


def check(output: RequestOutput, rows: Any, params: SamplingParams) -> None:
    """`rows` [len(token_ids), vocab_size]: the logits that each output token was drawn from."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    total = 0.0
    for position, token, row in zip(completion.logprobs, completion.token_ids, rows, strict=True):
        scaled = (row / params.temperature).log_softmax(-1)
        kept = sorted(position, key=lambda token: position[token].rank)
        entry, mass = position[token], position[token].surviving_mass
        assert mass is not None
        assert mass == pytest.approx(float(scaled[kept].exp().sum()), abs=2e-4)
        assert all(scaled[kept[-1]] >= scaled[other] for other in range(len(row)) if other not in position)
        # What a trainer does: the log probability without truncation.
        assert entry.logprob + math.log(mass) == pytest.approx(float(scaled[token]), abs=5e-4)
        assert math.fsum(math.exp(other.logprob) for other in position.values()) == pytest.approx(1.0, abs=1e-5)
        assert all(other.surviving_mass == mass for other in position.values())
        total += entry.logprob
    assert completion.cumulative_logprob == pytest.approx(total)


def support_size(row: Any, params: SamplingParams) -> int:
    """How many tokens min_p, top_k and top_p keep, counted one by one."""
    probs = sorted((row / params.temperature).softmax(-1).tolist(), reverse=True)
    kept = [prob for prob in probs if prob >= params.min_p * probs[0]][: params.top_k or None]
    wanted, reached = params.top_p * math.fsum(kept), 0.0
    for count, prob in enumerate(kept, 1):
        reached += prob
        if reached >= wanted:
            return count
    return len(kept)


def params_of(**given: Any) -> SamplingParams:
    given = {"seed": 3, "max_tokens": 24, "ignore_eos": True, "logprobs": -1} | given
    return SamplingParams(logprobs_mode="processed_logprobs", **given)


@pytest.mark.parametrize("operators", [None, "native"])
@pytest.mark.parametrize("speculative", [None, LOOKUP], ids=["plain", "drafts"])
def test_they_are_of_the_distribution_that_is_drawn_from(
    make_llm: Callable[..., LLM], logits: Logits, speculative: dict[str, Any] | None, operators: str | None
) -> None:
    llm = make_llm(model={"max_logprobs": -1, "operators": operators}, speculative=speculative)
    params = params_of(**(TRUNCATED if speculative is None else NARROW), max_tokens=60)
    output = llm.generate([PROMPT], params)[0]
    if speculative is not None:
        assert output.metrics.num_accepted > 0
    rows = logits(PROMPT + output.outputs[0].token_ids)[len(PROMPT) - 1 : -1]
    check(output, rows, params)
    sizes = [len(position) for position in output.outputs[0].logprobs or ()]
    assert sizes == [support_size(row, params) for row in rows]


def test_penalties_and_biases_are_part_of_it(make_llm: Callable[..., LLM], logits: Logits) -> None:
    import torch

    llm = make_llm(model={"max_logprobs": -1})
    params = params_of(temperature=0.9, top_p=0.9, presence_penalty=1.5, logit_bias={9: 2.0})
    output = llm.generate([PROMPT], params)[0]
    tokens = output.outputs[0].token_ids
    rows = logits(PROMPT + tokens)[len(PROMPT) - 1 : -1].clone()
    rows[:, 9] += 2.0
    for index in range(len(tokens)):
        rows[index, torch.tensor(sorted(set(tokens[:index])), dtype=torch.long)] -= 1.5
    check(output, rows, params)


def test_requests_of_one_batch_choose_by_themselves(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    processed = params_of(**TRUNCATED, logprobs=2)
    raw = SamplingParams(seed=3, max_tokens=24, ignore_eos=True, logprobs=2, **TRUNCATED)
    alone = [llm.generate([PROMPT], params)[0] for params in (processed, raw)]
    together = llm.generate([PROMPT, PROMPT], [processed, raw])
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
    masses = [[next(iter(p.values())).surviving_mass for p in out.outputs[0].logprobs or ()] for out in together]
    assert all(mass is not None and 0.0 < mass < 1.0 for mass in masses[0])
    assert masses[1] == [None] * 24


def test_drafts_change_neither_tokens_nor_what_is_said_of_them(make_llm: Callable[..., LLM]) -> None:
    """Greedy, so that both draw the same tokens."""
    params = params_of(temperature=0, logprobs=1)
    plain = make_llm().generate([PROMPT], params)[0].outputs[0]
    drafted = make_llm(speculative=LOOKUP).generate([PROMPT], params)[0].outputs[0]
    assert plain.token_ids == drafted.token_ids
    assert plain.logprobs is not None
    assert drafted.logprobs is not None
    for token, one, other in zip(plain.token_ids, plain.logprobs, drafted.logprobs, strict=True):
        assert one.keys() == other.keys() == {token}
        assert one[token].logprob == other[token].logprob == 0.0
        assert one[token].surviving_mass == pytest.approx(other[token].surviving_mass, abs=1e-5)


def test_the_config_says_what_requests_get_that_do_not(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(model={"logprobs_mode": "processed_logprobs"})
    params = {"seed": 3, "max_tokens": 4, "logprobs": 0, **TRUNCATED}
    outputs = [
        llm.generate([PROMPT], SamplingParams(**params, logprobs_mode=mode))[0].outputs[0]
        for mode in (None, "processed_logprobs", "raw_logprobs")
    ]
    assert outputs[0].logprobs == outputs[1].logprobs != outputs[2].logprobs


def test_log_probabilities_of_prompts_stay_raw(make_llm: Callable[..., LLM], logits: Logits) -> None:
    params = params_of(**TRUNCATED, logprobs=0, prompt_logprobs=0, max_tokens=1)
    draw = random.Random(0)
    prompt = [draw.randrange(3, 128) for _ in range(9)]
    output = make_llm().generate([prompt], params)[0]
    expected = logits(prompt).log_softmax(-1)
    for index, position in enumerate((output.prompt_logprobs or [])[1:]):
        assert position is not None
        entry = position[prompt[index + 1]]
        assert entry.logprob == pytest.approx(float(expected[index, prompt[index + 1]]), abs=2e-4)
        assert entry.surviving_mass is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logprobs": 1, "logprobs_mode": "processed"}, "logprobs_mode must be None, raw_logprobs or processed_logp"),
        ({"logprobs": 1, "logprobs_mode": "raw_logits"}, "logprobs_mode must be"),
        ({"logprobs": 1, "logprobs_mode": 1}, "logprobs_mode must be"),
        ({"logprobs_mode": "raw_logprobs"}, "set logprobs"),
    ],
)
def test_bad_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**given)


def test_a_config_of_another_mode_is_refused(make_llm: Callable[..., LLM]) -> None:
    with pytest.raises(ConfigError, match=r"model\.logprobs_mode"):
        make_llm(model={"logprobs_mode": "raw_logits"})
