"""Log probabilities of outputs and prompts equal those of transformers, whatever way the engine takes to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from dovetail import LLM, SamplingParams
from dovetail.contracts.outputs import PositionLogprobs

LogProbs = Callable[[list[int]], Any]
DRAW = random.Random(11)
LONG = [DRAW.randrange(3, 128) for _ in range(45)]


def check_position(position: PositionLogprobs, token: int, expected: Any, num_top: int) -> None:
    """`expected` [vocab_size] are the oracle's log probabilities."""
    top = expected.topk(num_top)
    assert next(iter(position)) == token
    assert set(position) == {token, *top.indices.tolist()}
    for candidate, entry in position.items():
        assert entry.logprob == pytest.approx(float(expected[candidate]), abs=2e-4)
        assert entry.rank == int((expected > expected[candidate]).sum()) + 1
        assert entry.decoded_token is None


def check_prompt(found: list[PositionLogprobs | None] | None, ids: list[int], log_probs: Any, num_top: int) -> None:
    assert found is not None
    assert found[0] is None
    assert len(found) == len(ids)
    for index, position in enumerate(found[1:]):
        assert position is not None
        check_position(position, ids[index + 1], log_probs[index], num_top)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("num_top", [0, 4])
def test_output_logprobs(
    make_llm: Callable[..., LLM], hf_log_probs: LogProbs, temperature: float, num_top: int
) -> None:
    # Penalties and temperature change what is drawn, never what is reported.
    params = SamplingParams(
        temperature=temperature, seed=3, logprobs=num_top, max_tokens=8, repetition_penalty=1.2, logit_bias={7: 5.0}
    )
    prompts = [[5, 6, 7], LONG[:20]]
    for prompt, output in zip(prompts, make_llm().generate(prompts, params), strict=True):
        completion = output.outputs[0]
        expected = hf_log_probs(prompt + completion.token_ids)[len(prompt) - 1 : -1]
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids) == 8
        for position, token, row in zip(completion.logprobs, completion.token_ids, expected, strict=True):
            check_position(position, token, row, num_top)
        total = sum(position[t].logprob for position, t in zip(completion.logprobs, completion.token_ids, strict=True))
        assert completion.cumulative_logprob == pytest.approx(total)


def test_no_logprobs_unless_asked(make_llm: Callable[..., LLM]) -> None:
    output = make_llm().generate([5, 6], SamplingParams(max_tokens=2))[0]
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None
    assert output.prompt_logprobs is None


def test_the_whole_vocabulary(make_llm: Callable[..., LLM], hf_log_probs: LogProbs) -> None:
    llm = make_llm(model={"max_logprobs": -1})
    output = llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1))[0]
    assert output.outputs[0].logprobs is not None
    check_position(output.outputs[0].logprobs[0], output.outputs[0].token_ids[0], hf_log_probs([5, 6])[-1], 128)
    check_prompt(output.prompt_logprobs, [5, 6], hf_log_probs([5, 6]), 128)


@pytest.mark.parametrize("chunk", [7, 512])
def test_prompt_logprobs(make_llm: Callable[..., LLM], hf_log_probs: LogProbs, chunk: int) -> None:
    llm = make_llm(scheduler={"max_num_batched_tokens": chunk, "max_num_seqs": 7})
    prompts = [[5, 6, 7], LONG, [9]]
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        check_prompt(output.prompt_logprobs, prompt, hf_log_probs(prompt), 2)


def test_prompt_logprobs_with_a_warm_prefix_cache(make_llm: Callable[..., LLM], hf_log_probs: LogProbs) -> None:
    llm = make_llm()
    plain = SamplingParams(temperature=0, max_tokens=3)
    asking = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)
    first = llm.generate(LONG, plain)[0]
    output = llm.generate(LONG, asking)[0]
    check_prompt(output.prompt_logprobs, LONG, hf_log_probs(LONG), 2)
    assert output.num_cached_tokens == 0
    again = llm.generate(LONG, plain)[0]
    assert again.num_cached_tokens == 44
    assert first.outputs[0].token_ids == output.outputs[0].token_ids == again.outputs[0].token_ids


@pytest.mark.parametrize("n", [2, 5])
def test_prompt_logprobs_of_several_completions(make_llm: Callable[..., LLM], hf_log_probs: LogProbs, n: int) -> None:
    llm = make_llm(scheduler={"max_num_batched_tokens": 16, "max_num_seqs": 8})
    output = llm.generate(LONG, SamplingParams(n=n, seed=1, max_tokens=3, prompt_logprobs=2))[0]
    check_prompt(output.prompt_logprobs, LONG, hf_log_probs(LONG), 2)
    # The prompt was computed once; the others share its blocks.
    assert llm.engine.cache_statistics().prefix_hit_tokens >= (n - 1) * (len(LONG) - 1)


@pytest.mark.parametrize("cache", [{"num_blocks": 40}, {"num_blocks": 40, "swap_gib": 0.01}], ids=["recompute", "swap"])
def test_logprobs_under_preemption(
    make_llm: Callable[..., LLM], hf_log_probs: LogProbs, cache: dict[str, float]
) -> None:
    scheduler = {"max_num_batched_tokens": 24, "max_num_seqs": 8}
    llm = make_llm(cache=cache, model={"max_model_len": 128}, scheduler=scheduler)
    prompts = [[index + 3, *LONG[:30]] for index in range(6)]
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=1, prompt_logprobs=1)
    outputs = llm.generate(prompts, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        expected = hf_log_probs(prompt + completion.token_ids)
        check_prompt(output.prompt_logprobs, prompt, expected[: len(prompt)], 1)
        assert completion.logprobs is not None
        for index, position in enumerate(completion.logprobs):
            check_position(position, completion.token_ids[index], expected[len(prompt) - 1 + index], 1)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("count", [21, -1])
def test_more_than_max_logprobs_is_refused(make_llm: Callable[..., LLM], field: str, count: int) -> None:
    with pytest.raises(
        ValueError, match=rf"{field} is {count}, but model.max_logprobs allows 20: ask for fewer, or raise"
    ):
        make_llm().generate([5], SamplingParams(**{field: count}))


def test_decoded_tokens_make_up_the_text(make_stories: Callable[..., LLM]) -> None:
    output = make_stories().generate("Once upon a time", SamplingParams(temperature=0, max_tokens=12, logprobs=2))[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    spelled = [position[t].decoded_token for position, t in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert "".join(text or "" for text in spelled) == completion.text


def test_without_detokenizing_tokens_have_no_text(make_text_llm: Callable[..., LLM]) -> None:
    llm = make_text_llm()
    for detokenize in (True, False):
        params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1, detokenize=detokenize)
        output = llm.generate([[5, 6, 7]], params)[0]
        positions = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
        texts = [logprob.decoded_token for position in positions if position for logprob in position.values()]
        assert len(texts) >= 5
        assert all((text is not None) == detokenize for text in texts)
