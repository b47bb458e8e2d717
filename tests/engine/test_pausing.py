"""Pauses: what becomes of the requests that run, of those that come meanwhile, and of both while the engine sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dovetail import LLM, AsyncLLMEngine, BeamSearchParams, LLMEngine, SamplingParams
from dovetail.contracts.errors import RequestError
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.pausing import EngineConflict

MakeLLM = Callable[..., LLM]
Greedy = Callable[[list[int], int], list[int]]

PROMPTS = [[3 + 7 * i % 120 for i in range(length)] for length in (9, 14, 22)]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
NGRAM = {"drafters": {"lookup": {"name": "ngram", "num_tokens": 3, "min_match": 1, "length": "fixed"}}}


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.is_runnable:
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    return outputs


def tokens_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def begin(engine: LLMEngine, num_tokens: int = 3) -> None:
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, GREEDY)
    while engine.token_progress(["2"]).num_output_tokens < num_tokens:
        engine.step()


def test_abort_ends_what_runs_and_holds_what_comes(make_llm: MakeLLM, hf_greedy: Greedy) -> None:
    engine = make_llm().engine
    begin(engine)
    assert engine.pause("abort").done()
    assert engine.has_unfinished_requests()  # nobody was told yet
    outputs = run(engine)
    assert {output.outputs[0].finish_reason for output in outputs.values()} == {"abort"}
    assert all(len(tokens_of(output)) >= 3 for output in outputs.values())
    assert not engine.has_unfinished_requests()
    engine.add_request("late", PROMPTS[0], GREEDY)
    assert run(engine) == {}
    assert engine.is_paused()
    engine.resume()
    assert tokens_of(run(engine)["late"]) == hf_greedy(PROMPTS[0], NUM_TOKENS)


def test_wait_is_done_when_the_last_has_ended(make_llm: MakeLLM, hf_greedy: Greedy) -> None:
    engine = make_llm().engine
    begin(engine)
    done = engine.pause("wait")
    engine.add_request("late", PROMPTS[0], GREEDY)
    assert not done.done()
    outputs = run(engine)
    assert done.done()
    for index, prompt in enumerate(PROMPTS):
        assert tokens_of(outputs.pop(str(index))) == hf_greedy(prompt, NUM_TOKENS)
    assert outputs == {}
    engine.resume()
    assert tokens_of(run(engine)["late"]) == hf_greedy(PROMPTS[0], NUM_TOKENS)


def test_wait_does_not_wait_for_what_somebody_holds(make_llm: MakeLLM, hf_greedy: Greedy) -> None:
    engine = make_llm().engine
    begin(engine)
    engine.hold("1")
    engine.step()
    done = engine.pause("wait")
    assert set(run(engine)) == {"0", "2"}
    assert done.done()
    engine.resume("1")
    assert run(engine) == {}  # the pause holds it, too
    engine.resume()
    assert tokens_of(run(engine)["1"]) == hf_greedy(PROMPTS[1], NUM_TOKENS)


@pytest.mark.parametrize("level", [None, 1, 2])
@pytest.mark.parametrize("sections", [{}, {"speculative": NGRAM}], ids=["plain", "drafts"])
def test_what_is_kept_goes_on_with_the_same_tokens(
    make_llm: MakeLLM, hf_greedy: Greedy, sections: dict[str, Any], level: int | None
) -> None:
    """Also where the engine sleeps meanwhile: the pages are lost, nothing of them is found, all is computed again."""
    engine = make_llm(**sections).engine
    begin(engine)
    engine.pause("keep")
    run(engine)
    made = engine.token_progress(["0", "1", "2"]).num_output_tokens
    if level is not None:
        engine.sleep(level)
        assert engine.cache_statistics().num_used_blocks == engine.cache_statistics().num_cached_blocks == 0
        engine.add_request("late", PROMPTS[0], GREEDY)  # held by the pause, so it may come
        with pytest.raises(EngineConflict, match="that sleeps cannot resume: call wake_up first"):
            engine.resume()
        engine.wake_up()
        engine.abort_request("late")
        assert engine.token_progress(["0"]).num_prompt_tokens == 0
    assert run(engine) == {}
    assert engine.token_progress(["0", "1", "2"]).num_output_tokens == made
    engine.resume()
    outputs = run(engine)
    for index, prompt in enumerate(PROMPTS):
        assert tokens_of(outputs[str(index)]) == hf_greedy(prompt, NUM_TOKENS)


def test_swapped_and_waiting_requests_are_kept_through_a_sleep(make_llm: MakeLLM, hf_greedy: Greedy) -> None:
    tight = {"scheduler": {"max_num_batched_tokens": 24, "max_num_seqs": 4}, "model": {"max_model_len": 44}}
    engine = make_llm(**tight, cache={"num_blocks": 13, "swap_gib": 0.001}).engine
    begin(engine, num_tokens=1)
    engine.pause("keep")
    engine.sleep()
    assert engine.cache_statistics().num_used_host_blocks == 0
    engine.wake_up()
    engine.resume()
    outputs = run(engine)
    for index, prompt in enumerate(PROMPTS):
        assert tokens_of(outputs[str(index)]) == hf_greedy(prompt, NUM_TOKENS)


def test_what_is_illegal_changes_nothing(make_llm: MakeLLM, hf_greedy: Greedy) -> None:
    engine = make_llm().engine
    begin(engine)
    with pytest.raises(EngineConflict, match="cannot sleep while requests are unfinished"):
        engine.sleep()
    with pytest.raises(RequestError, match="pause mode 'stop': it is one of abort, wait, keep"):
        engine.pause("stop")  # type: ignore[arg-type]
    with pytest.raises(EngineConflict, match="the engine is awake"):
        engine.wake_up()
    assert not engine.is_paused()
    engine.resume()  # of what is not paused
    outputs = run(engine)
    for index, prompt in enumerate(PROMPTS):
        assert tokens_of(outputs[str(index)]) == hf_greedy(prompt, NUM_TOKENS)


def test_beam_search_cannot_be_held(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.pause()
    with pytest.raises(EngineConflict, match="beam search cannot be held"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=3), use_tqdm=False)


def test_calls_of_other_threads_wait_for_resume(make_llm: MakeLLM, hf_greedy: Greedy) -> None:
    llm = make_llm()
    llm.pause("wait")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, [PROMPTS[0]], GREEDY, use_tqdm=False)
        while not llm.engine.request_ids:
            pass
        assert llm.is_paused()
        llm.resume()
        assert tokens_of(call.result(timeout=60)[0]) == hf_greedy(PROMPTS[0], NUM_TOKENS)


def test_coroutines_pause_and_resume(make_llm: MakeLLM, hf_greedy: Greedy) -> None:
    engine = AsyncLLMEngine(make_llm().engine)

    async def main() -> None:
        first = await engine.submit(PROMPTS[0], GREEDY)
        await engine.pause("wait")
        assert [tokens_of(output) async for output in first][-1] == hf_greedy(PROMPTS[0], NUM_TOKENS)
        second = await engine.submit(PROMPTS[1], GREEDY)
        await engine.sleep()
        with pytest.raises(EngineConflict):
            await engine.resume()
        await engine.wake_up()
        assert await engine.is_paused()
        await engine.resume()
        assert [tokens_of(output) async for output in second][-1] == hf_greedy(PROMPTS[1], NUM_TOKENS)
        third = await engine.submit(PROMPTS[2], GREEDY)
        await engine.pause("abort")
        assert [output.outputs[0].finish_reason async for output in third][-1] in ("abort", "length")

    with engine:
        asyncio.run(main())
