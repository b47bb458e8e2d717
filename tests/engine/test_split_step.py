"""`LLMEngine.schedule` and `execute_step`: a step in two halves, with something in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dovetail import LLM, LLMEngine, SamplingParams
from dovetail.contracts.pausing import EngineConflict

PROMPTS = {"a": [5, 9, 33, 70, 12], "b": list(range(3, 40)), "c": [100, 4], "d": list(range(30, 55))}
# 14 blocks of 4 tokens: requests are preempted, and prompts cut into chunks.
LITTLE = {"max_model_len": 52}, {"num_blocks": 15}, {"max_num_seqs": 3, "max_num_batched_tokens": 16}


def little_engine(make_llm: Callable[..., LLM], **cache: Any) -> LLMEngine:
    model, blocks, scheduler = LITTLE
    return make_llm(model=model, cache=blocks | cache, scheduler=scheduler).engine


def add_all(engine: LLMEngine) -> None:
    for seed, (request_id, prompt) in enumerate(PROMPTS.items()):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=8, n=1 + seed % 2, output_kind="final_only")
        engine.add_request(request_id, prompt, params)


def tokens(outputs: list[Any]) -> dict[str, list[list[int]]]:
    return {output.request_id: [list(c.token_ids) for c in output.outputs] for output in outputs}


def run(engine: LLMEngine) -> dict[str, list[list[int]]]:
    found: list[Any] = []
    while engine.has_unfinished_requests():
        found += engine.step()
    return tokens(found)


def run_split(engine: LLMEngine, between: Callable[[int], object] = lambda _: None) -> dict[str, list[list[int]]]:
    """`between`: called with the number of the step, after it was scheduled."""
    found: list[Any] = []
    number = 0
    while engine.has_unfinished_requests():
        assert engine.schedule() is not None
        between(number)
        scheduled = engine.schedule()
        assert scheduled is not None
        found += engine.execute_step(scheduled)
        number += 1
    return tokens(found)


@pytest.mark.parametrize("cache", [{}, {"swap_gib": 0.001}], ids=["", "swap"])
def test_halves_of_steps_bring_what_steps_bring(make_llm: Callable[..., LLM], cache: dict[str, Any]) -> None:
    engine = little_engine(make_llm, **cache)
    add_all(engine)
    expected = run(engine)
    engine.reset_prefix_cache()
    add_all(engine)
    assert run_split(engine) == expected


def test_a_scheduled_step_says_what_it_computes(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm().engine
    assert engine.schedule() is None
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True))
    first = engine.schedule()
    assert first is not None
    assert (first.request_ids, first.num_tokens, first.is_running) == (("a",), (3,), False)
    engine.add_request("b", [8, 9], SamplingParams(max_tokens=1, ignore_eos=True))
    assert engine.schedule() is first
    (output,) = engine.execute_step(first)
    assert len(output.outputs[0].token_ids) == 1
    second = engine.schedule()
    assert second is not None
    assert dict(zip(second.request_ids, second.num_tokens, strict=True)) == {"a": 1, "b": 2}
    assert {output.request_id for output in engine.execute_step(second) if output.finished} == {"a", "b"}
    assert not engine.has_unfinished_requests()


def test_another_step_than_the_next_is_refused(make_llm: Callable[..., LLM]) -> None:
    engine, other = make_llm().engine, make_llm().engine
    for each in (engine, other):
        each.add_request("a", PROMPTS["a"], SamplingParams(temperature=0, max_tokens=6))
    expected = run(other)
    first = engine.schedule()
    assert first is not None
    engine.execute_step(first)
    engine.schedule()
    other.add_request("b", [1, 2], SamplingParams(max_tokens=1))
    foreign = other.schedule()
    assert foreign is not None
    for wrong in (first, foreign):
        with pytest.raises(EngineConflict, match="cannot be executed"):
            engine.execute_step(wrong)
    assert run_split(engine) == expected
    run_split(other)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_requests_are_aborted_between_the_halves(make_llm: Callable[..., LLM], at: int) -> None:
    engine = little_engine(make_llm)
    add_all(engine)
    expected = run(engine)
    add_all(engine)
    aborted: list[str] = []

    def abort(number: int) -> None:
        before = engine.schedule()
        if number != at or before is None:
            return
        aborted.append(before.request_ids[0])
        engine.abort_request(aborted)
        with pytest.raises(EngineConflict, match="aborted"):
            engine.execute_step(before)
        after = engine.schedule()
        assert after is not None
        assert aborted[0] not in after.request_ids

    found = run_split(engine, abort)
    assert found == {request_id: ids for request_id, ids in expected.items() if request_id not in aborted}
    assert len(found) == 3


def test_the_next_step_executes_what_was_scheduled(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm().engine
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
    scheduled = engine.schedule()
    engine.add_request("b", [8], SamplingParams(max_tokens=1, ignore_eos=True))
    assert [output.request_id for output in engine.step()] == ["a"]
    assert scheduled is not None
    with pytest.raises(EngineConflict):
        engine.execute_step(scheduled)
    run(engine)


def test_a_pause_executes_what_was_scheduled(make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any]) -> None:
    engine = make_llm().engine
    engine.add_request("a", PROMPTS["a"], SamplingParams(temperature=0, max_tokens=5))
    before = engine.schedule()
    assert before is not None
    engine.pause("keep").result(0)
    with pytest.raises(EngineConflict, match="paused"):
        engine.execute_step(before)
    brought = engine.schedule()
    assert brought is not None
    assert brought.step_id is None
    (output,) = engine.execute_step(brought)
    assert len(output.outputs[0].token_ids) == 1
    assert engine.schedule() is None
    engine.sleep()
    engine.wake_up()
    engine.resume()
    assert run_split(engine)["a"] == [hf_greedy(PROMPTS["a"], 5)]


def test_a_step_all_of_whose_requests_were_aborted_is_executed(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm().engine
    # Its only token would end it, and bring log probabilities of its prompt.
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=1, prompt_logprobs=1))
    engine.schedule()
    engine.abort_request("a")
    assert engine.has_unfinished_requests()
    assert engine.is_runnable
    empty = engine.schedule()
    assert empty is not None
    assert (empty.request_ids, empty.num_tokens) == ((), ())
    assert engine.execute_step(empty) == []
    assert not engine.has_unfinished_requests()


def test_steps_that_overlap_are_running_when_they_are_scheduled(make_llm: Callable[..., LLM]) -> None:
    device = {"name": "gpu", "device": "null", "null_order": "at once"}
    engine = make_llm(executor=device, attention="reference").engine
    add_all(engine)
    running: list[bool] = []

    def note(_: int) -> None:
        scheduled = engine.schedule()
        assert scheduled is not None
        running.append(scheduled.is_running)

    found = run_split(engine, note)
    assert running[0] is False
    assert any(running)
    add_all(engine)
    assert run(engine) == found
