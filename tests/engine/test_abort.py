"""Requests that come and go at any moment: nothing leaks, and those that stay are not disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail import LLM, LLMEngine, SamplingParams
from dovetail.contracts.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SHARED = list(range(20, 40))
PROMPTS = [[5, 6, 7], [9], SHARED, [*SHARED, 3, 4], [*SHARED[:9], 77], [8] * 33]

Event = tuple[str, int, int]
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(1, 4)),
        st.tuples(st.just("step"), st.integers(1, 5), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("reset"), st.just(0), st.just(0)),
    ),
    min_size=3,
    max_size=25,
)
MEMORY = {
    "ample": {"num_blocks": 300},
    "recompute": {"num_blocks": 21},
    "swap": {"num_blocks": 21, "swap_gib": 0.0005},
    "no prefix cache": {"num_blocks": 21, "prefix_caching": False},
}


@pytest.fixture(scope="module", params=MEMORY)
def engine(request: pytest.FixtureRequest, tiny_llama: tuple[Path, Any]) -> Iterator[LLMEngine]:
    """One engine for all examples: what one leaves behind, the next one meets. One request takes 16 of its blocks."""
    engine = LLMEngine.from_config(
        model={"path": str(tiny_llama[0]), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 64},
        cache={"block_size": 4, **MEMORY[request.param]},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 24},
        executor={"threads": 1},
    )
    yield engine
    engine.shutdown()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS)
def test_whatever_comes_and_goes_nothing_leaks(
    engine: LLMEngine,
    hf_greedy: Callable[[list[int], int], list[int]],
    check_nothing_is_held: Callable[[LLMEngine], None],
    events: list[Event],
) -> None:
    prompts: dict[str, int] = {}
    finished: dict[str, list[list[int]]] = {}

    def step() -> None:
        for output in engine.step():
            if output.finished:
                assert output.error is None
                finished[output.request_id] = [completion.token_ids for completion in output.outputs]

    for number, (event, value, n) in enumerate(events):
        if event == "add":
            prompts[f"r{number}"] = value
            engine.add_request(f"r{number}", PROMPTS[value], SamplingParams(temperature=1e-6, max_tokens=6, n=n))
        elif event == "step":
            for _ in range(value):
                step()
        elif event == "abort" and engine.request_ids:
            chosen = engine.request_ids[value % len(engine.request_ids)]
            (output,) = engine.abort_request(chosen)
            assert output.finished
            del prompts[chosen]
        else:
            engine.reset_prefix_cache()
    while engine.has_unfinished_requests():
        step()
    assert engine.request_ids == []
    check_nothing_is_held(engine)
    assert finished.keys() == prompts.keys()
    for request_id, completions in finished.items():
        for tokens in completions:
            assert tokens == hf_greedy(PROMPTS[prompts[request_id]], 6)


def test_unknown_ids_are_passed_over(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm().engine
    engine.add_request("a", [5], GREEDY)
    engine.add_request("b", [6], GREEDY)
    assert [output.request_id for output in engine.abort_request(["b", "nobody", "b"])] == ["b"]
    assert engine.request_ids == ["a"]
    engine.abort_request("a")


def test_an_id_is_free_again_once_its_request_ended(make_llm: Callable[..., LLM]) -> None:
    engine = make_llm().engine
    engine.add_request("a", [5], GREEDY)
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        engine.add_request("a", [6], GREEDY)
    engine.abort_request("a")
    engine.add_request("a", [6], GREEDY)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[-1].prompt_token_ids == [6]


def test_a_cache_salt_isolates_prefixes(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()

    def cached(**prompt: Any) -> int:
        return llm.generate({"prompt_token_ids": SHARED, **prompt}, GREEDY)[0].num_cached_tokens

    assert [cached(), cached(), cached(cache_salt="x"), cached(cache_salt="x"), cached(cache_salt="y")] == [
        0,
        16,
        0,
        16,
        0,
    ]
    # An explicit salt never meets requests without one, whatever it is called.
    assert cached(cache_salt="None") == 0
    assert cached(cache_salt="") == 0


def test_reset_prefix_cache_says_what_it_did(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    llm.generate(SHARED, GREEDY)
    cached = llm.engine.cache_statistics().num_cached_blocks
    assert cached == 6  # 25 of 26 tokens are computed
    llm.engine.add_request("running", SHARED, GREEDY)
    llm.engine.step()
    reset = llm.reset_prefix_cache()
    assert (reset.num_dropped, reset.num_in_use) == (2, 4)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert llm.generate(SHARED, GREEDY)[0].num_cached_tokens == 0
