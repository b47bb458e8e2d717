"""What ends a completion, and what `RequestOutput` says about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dovetail import LLM, LLMEngine, SamplingParams
from dovetail.contracts.outputs import CompletionOutput, RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=40)
PROMPT = "Once upon a time"


def complete(llm: LLM, prompt: Any, **params: Any) -> CompletionOutput:
    return llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 12, **params}))[0].outputs[0]


def run(engine: LLMEngine, prompt: Any, params: SamplingParams) -> list[RequestOutput]:
    """Every output of one request."""
    engine.add_request("it", prompt, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


class TestEnds:
    """finish_reason and stop_reason."""

    def test_length(self, make_llm: Callable[..., LLM]) -> None:
        completion = complete(make_llm(), [5, 6], max_tokens=3)
        assert (completion.finish_reason, completion.stop_reason, len(completion.token_ids)) == ("length", None, 3)
        assert completion.finished

    def test_without_max_tokens_the_model_length_ends(self, make_llm: Callable[..., LLM]) -> None:
        completion = complete(make_llm(model={"max_model_len": 32}), [5, 6], max_tokens=None)
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 30)

    def test_a_prompt_may_leave_room_for_one_token(self, make_llm: Callable[..., LLM]) -> None:
        completion = complete(make_llm(model={"max_model_len": 32}), [5] * 31, max_tokens=9)
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 1)

    def test_end_of_sequence(self, make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any]) -> None:
        expected = hf_greedy([5, 6], 12)
        eos = expected[4]
        llm = make_llm(model={"hf_overrides": {"eos_token_id": eos}})
        completion = complete(llm, [5, 6])
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert completion.token_ids == expected[: expected.index(eos) + 1]

    def test_ignore_eos(self, make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any]) -> None:
        expected = hf_greedy([5, 6], 12)
        llm = make_llm(model={"hf_overrides": {"eos_token_id": expected[4]}})
        assert complete(llm, [5, 6], ignore_eos=True).token_ids == expected

    def test_stop_token(self, make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any]) -> None:
        expected = hf_greedy([5, 6], 12)
        stop = expected[3]
        completion = complete(make_llm(), [5, 6], stop_token_ids=[stop])
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.token_ids == expected[: expected.index(stop) + 1]

    def test_min_tokens_holds_ends_back(self, make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any]) -> None:
        ends = hf_greedy([5, 6], 12)
        llm = make_llm(model={"hf_overrides": {"eos_token_id": ends[0]}})
        completion = complete(llm, [5, 6], stop_token_ids=ends[1:3], min_tokens=6, max_tokens=200)
        assert len(completion.token_ids) > 6 or completion.token_ids[-1] in ends[:3]
        assert not set(completion.token_ids[:6]) & set(ends[:3])

    def test_abort(self, make_llm: Callable[..., LLM]) -> None:
        engine = make_llm().engine
        engine.add_request("it", [5, 6], GREEDY)
        engine.step()
        engine.step()
        (last,) = engine.abort_request("it")
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        assert len(last.outputs[0].token_ids) == 2
        assert last.metrics.finished_time is not None


class TestStopStrings:
    """Text decides, wherever tokens are cut."""

    @pytest.fixture
    def llm(self, make_stories: Callable[..., LLM]) -> LLM:
        return make_stories()

    @pytest.fixture
    def free(self, llm: LLM) -> CompletionOutput:
        return llm.generate(PROMPT, GREEDY)[0].outputs[0]

    @pytest.mark.parametrize(("start", "length"), [(3, 1), (9, 7), (20, 12)])
    def test_a_stop_string_across_tokens(self, llm: LLM, free: CompletionOutput, start: int, length: int) -> None:
        stop = free.text[start : start + length]
        completion = complete(llm, PROMPT, max_tokens=40, stop=stop)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert completion.text == free.text[: free.text.index(stop)]
        # The token that completed it is the last.
        text = llm.get_tokenizer().decode(free.token_ids[: len(completion.token_ids)])
        assert stop in text
        assert stop not in llm.get_tokenizer().decode(completion.token_ids[:-1])

    def test_it_may_be_kept_in_the_output(self, llm: LLM, free: CompletionOutput) -> None:
        stop = free.text[9:16]
        completion = complete(llm, PROMPT, max_tokens=40, stop=[stop, "never"], include_stop_str_in_output=True)
        assert completion.text == free.text[: free.text.index(stop)] + stop

    def test_the_text_of_a_stop_token_may_be_kept(self, llm: LLM, free: CompletionOutput) -> None:
        stop = free.token_ids[3]
        hidden = complete(llm, PROMPT, stop_token_ids=[stop])
        shown = complete(llm, PROMPT, stop_token_ids=[stop], include_stop_str_in_output=True)
        assert hidden.token_ids == shown.token_ids
        assert free.text.startswith(shown.text)
        assert shown.text.startswith(hidden.text)
        assert len(shown.text) > len(hidden.text)

    def test_none_is_looked_for_before_min_tokens(self, llm: LLM, free: CompletionOutput) -> None:
        stop = free.text[9:12]
        second = free.text.find(stop, free.text.index(stop) + 1)
        completion = complete(llm, PROMPT, max_tokens=40, stop=stop, min_tokens=8)
        assert len(completion.token_ids) > 8
        assert completion.text.startswith(llm.get_tokenizer().decode(free.token_ids[:8]))
        assert second < 0 or completion.finish_reason == "stop"

    def test_streams_never_show_a_part_of_it(self, llm: LLM, free: CompletionOutput) -> None:
        stop = free.text[20:32]
        kept = free.text[: free.text.index(stop)]
        outputs = run(llm.engine, PROMPT, replace(GREEDY, stop=stop, output_kind="delta"))
        assert "".join(output.outputs[0].text for output in outputs) == kept

    def test_a_stop_string_that_does_not_come_changes_nothing(self, llm: LLM, free: CompletionOutput) -> None:
        assert complete(llm, PROMPT, max_tokens=40, stop=["lit!", free.text[-3:] + "!"]) == free

    def test_detokenize_off_gives_no_text(self, llm: LLM, free: CompletionOutput) -> None:
        completion = complete(llm, PROMPT, max_tokens=40, detokenize=False)
        assert (completion.text, completion.token_ids) == ("", free.token_ids)

    def test_the_engine_serves_on_after_a_stop_string(
        self, llm: LLM, free: CompletionOutput, check_nothing_is_held: Callable[[LLMEngine], None]
    ) -> None:
        complete(llm, PROMPT, stop=free.text[3])
        check_nothing_is_held(llm.engine)
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0] == free


class TestSeveralCompletions:
    """n and best_of."""

    def test_n_shares_the_prompt(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm()
        prompt = list(range(3, 25))  # 22 tokens: five full blocks of 4, and one that is copied on write
        output = llm.generate(prompt, SamplingParams(n=4, seed=5, max_tokens=6))[0]
        assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
        statistics = llm.engine.cache_statistics()
        assert statistics.num_copied_blocks == 3
        assert statistics.prefix_hit_tokens == 3 * 21

    def test_the_first_of_n_equals_n_1_with_that_seed(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm()
        params = SamplingParams(seed=5, max_tokens=10)
        several = llm.generate([5, 6], replace(params, n=3))[0].outputs
        assert several[0] == llm.generate([5, 6], params)[0].outputs[0]
        assert several == llm.generate([5, 6], replace(params, n=3))[0].outputs

    def test_nearly_greedy_completions_are_alike(
        self, make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any]
    ) -> None:
        output = make_llm().generate(list(range(3, 40)), replace(GREEDY, temperature=1e-6, n=3))[0]
        assert [c.token_ids for c in output.outputs] == [hf_greedy(list(range(3, 40)), 40)] * 3

    def test_best_of_returns_the_likeliest(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm()
        params = SamplingParams(seed=5, max_tokens=6, logprobs=0)
        everyone = llm.generate([5, 6], replace(params, n=6))[0].outputs
        best = llm.generate([5, 6], SamplingParams(seed=5, max_tokens=6, n=2, best_of=6))[0]
        ranked = sorted(everyone, key=lambda c: c.cumulative_logprob or 0.0, reverse=True)
        assert [c.token_ids for c in best.outputs] == [c.token_ids for c in ranked[:2]]
        assert [c.cumulative_logprob for c in best.outputs] == [c.cumulative_logprob for c in ranked[:2]]
        assert [c.index for c in best.outputs] == [0, 1]
        assert all(c.logprobs is None for c in best.outputs)
        assert best.metrics.num_generated_tokens == 36

    def test_best_of_ranks_completions_of_different_lengths_by_log_probability_per_token(
        self, make_llm: Callable[..., LLM]
    ) -> None:
        llm = make_llm()
        params = SamplingParams(seed=5, max_tokens=12, stop_token_ids=list(range(0, 128, 8)))
        everyone = llm.generate([5, 6], replace(params, n=8, logprobs=0))[0].outputs
        means = {tuple(c.token_ids): (c.cumulative_logprob or 0.0) / len(c.token_ids) for c in everyone}
        sums = {tuple(c.token_ids): c.cumulative_logprob or 0.0 for c in everyone}
        ranked = sorted(means, key=means.__getitem__, reverse=True)
        assert ranked[0] != max(sums, key=sums.__getitem__), "the completions must tell the two rankings apart"
        best = llm.generate([5, 6], replace(params, n=3, best_of=8))[0]
        assert [tuple(c.token_ids) for c in best.outputs] == ranked[:3]

    def test_completions_may_end_apart(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm()
        lengths = {
            len(c.token_ids)
            for c in llm.generate(
                [5, 6], SamplingParams(n=5, seed=2, max_tokens=40, stop_token_ids=list(range(3, 20)))
            )[0].outputs
        }
        assert len(lengths) > 1

    def test_one_token_each(self, make_llm: Callable[..., LLM]) -> None:
        output = make_llm().generate([5, 6, 7, 8, 9], SamplingParams(n=4, seed=1, max_tokens=1))[0]
        assert [len(c.token_ids) for c in output.outputs] == [1, 1, 1, 1]


class TestOutputKinds:
    """cumulative, delta and final_only tell the same story."""

    PARAMS = SamplingParams(
        n=3, seed=4, max_tokens=14, logprobs=1, stop_token_ids=list(range(300, 330)), temperature=0.8
    )

    @pytest.mark.parametrize("chunk", [4, 512])
    def test_they_agree(self, make_stories: Callable[..., LLM], chunk: int) -> None:
        # Without the prefix cache, whose hits change the last bits of log probabilities.
        scheduler = {"max_num_batched_tokens": chunk, "max_num_seqs": 4}
        engine = make_stories(scheduler=scheduler, cache={"prefix_caching": False}).engine
        cumulative = run(engine, PROMPT, self.PARAMS)
        delta = run(engine, PROMPT, replace(self.PARAMS, output_kind="delta"))
        (final,) = run(engine, PROMPT, replace(self.PARAMS, output_kind="final_only"))
        assert cumulative[-1].outputs == final.outputs
        assert [output.finished for output in cumulative] == [False] * (len(cumulative) - 1) + [True]
        for whole in final.outputs:
            parts = [c for output in delta for c in output.outputs if c.index == whole.index]
            assert "".join(part.text for part in parts) == whole.text
            assert [token for part in parts for token in part.token_ids] == whole.token_ids
            assert [position for part in parts for position in part.logprobs or ()] == whole.logprobs
            assert parts[-1].cumulative_logprob == whole.cumulative_logprob
            assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [whole.finish_reason]

    def test_parts_of_a_prompt_bring_no_output(self, make_llm: Callable[..., LLM]) -> None:
        engine = make_llm(scheduler={"max_num_batched_tokens": 8, "max_num_seqs": 8}).engine
        outputs = run(engine, [5] * 30, SamplingParams(temperature=0, max_tokens=3))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]


class TestDrafts:
    """With speculation several tokens come in one step; outputs look as they do without."""

    def test_outputs_are_the_same(self, make_stories: Callable[..., LLM]) -> None:
        drafts = {"drafters": {"lookup": {"name": "ngram", "num_tokens": 4, "length": "fixed"}}}
        llm = make_stories(speculative=drafts, cache={"prefix_caching": False})
        prompt = "The cat saw the cat saw the cat saw the cat saw the"
        params = SamplingParams(temperature=0, max_tokens=60, logprobs=0, speculation="off")
        text = llm.generate(prompt, params)[0].outputs[0].text
        # Stop strings of all places: some end among drafts that stand, and drop those behind.
        stops = [(), *(text[start : start + 5] for start in range(0, len(text) - 5, 3))]
        plain = llm.generate([prompt] * len(stops), [replace(params, stop=stop) for stop in stops])
        speculated = llm.generate([prompt] * len(stops), [replace(params, stop=s, speculation=None) for s in stops])
        assert speculated[0].metrics.num_accepted > 0
        for expected, output in zip(plain, speculated, strict=True):
            self.check_alike(output.outputs[0], expected.outputs[0])

    def check_alike(self, completion: CompletionOutput, expected: CompletionOutput) -> None:
        assert (completion.text, completion.token_ids) == (expected.text, expected.token_ids)
        assert (completion.finish_reason, completion.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert completion.logprobs is not None
        assert [list(position) for position in completion.logprobs] == [[token] for token in completion.token_ids]
        assert completion.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)


class TestMetrics:
    """Times and counts."""

    def test_times_are_in_order(self, make_llm: Callable[..., LLM]) -> None:
        output = make_llm().generate([5, 6, 7], SamplingParams(max_tokens=5))[0]
        metrics = output.metrics
        assert metrics.first_scheduled_time is not None
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        assert metrics.arrival_time <= metrics.first_scheduled_time < metrics.first_token_time < metrics.finished_time
        assert (metrics.num_preemptions, metrics.num_generated_tokens) == (0, 5)

    def test_cached_tokens(self, make_llm: Callable[..., LLM]) -> None:
        llm = make_llm()
        prompt = list(range(3, 25))
        assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
        assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 20
        assert llm.generate([*prompt[:9], 99, 98], GREEDY)[0].num_cached_tokens == 8


def test_the_metrics_of_the_last_output_are_its_own(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm().engine
    engine.add_request("a", [5, 6], SamplingParams(temperature=0, max_tokens=3))
    first, second, last = (engine.step()[0] for _ in range(3))
    assert first.metrics is second.metrics
    assert last.metrics is not first.metrics
    assert last.metrics == first.metrics  # which went on until the end
    assert last.metrics.finished_time is not None
