"""Steps of several cohorts in flight: what comes out is what one step at a time gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail import LLM, LLMEngine, SamplingParams
from dovetail.contracts.outputs import RequestOutput
from tests.engine.late_executor import LateExecutor

LATE = str(Path(__file__).parent / "late_executor.py") + ":LateExecutor"
LONG = 24
PROMPTS = [[5, 9, 33, 70, 12], [100, 4], list(range(3, 60)), [7] * 20, [1, 2, 3], list(range(40, 90)), [90, 1] * 9, [8]]
LITTLE: dict[str, Any] = {
    "model": {"max_model_len": 100},
    "cache": {"block_size": 4, "num_blocks": 36, "swap_gib": 0.001},
    "scheduler": {"max_num_batched_tokens": 24, "max_num_seqs": 5},
}


def late(stages: int = 2) -> dict[str, Any]:
    return {"name": LATE, "stages": stages}


def greedy(num_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **more)


def executor_of(llm: LLM) -> LateExecutor:
    executor = llm.engine.tokens._parts.executor
    assert type(executor).__name__ == "LateExecutor"  # its module is loaded from the file
    return cast(LateExecutor, executor)


@pytest.fixture(scope="module")
def truth(tiny_llama: tuple[Path, Any]) -> list[list[int]]:
    """What one step at a time gives for each prompt."""
    with LLM(
        model={"path": str(tiny_llama[0]), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 256}
    ) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, greedy(LONG))]


def tokens(llm: LLM, num: int = len(PROMPTS)) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS[:num], greedy(LONG))]


@pytest.mark.parametrize("stages", [2, 4])
def test_requests_are_divided_evenly_and_as_many_steps_are_in_flight(
    make_llm: Callable[..., LLM], truth: list[list[int]], stages: int
) -> None:
    llm = make_llm(executor=late(stages))
    assert tokens(llm) == truth
    executor = executor_of(llm)
    assert max(executor.depths) == stages
    decodes = executor.sizes[2 * stages : -2 * stages]
    assert set(decodes) == {len(PROMPTS) // stages}
    assert executor.num_sampled > 0


def test_chunks_of_one_prompt_follow_each_other_in_flight(make_llm: Callable[..., LLM], truth: list[list[int]]) -> None:
    llm = make_llm(executor=late(), scheduler={"max_num_batched_tokens": 16, "max_num_seqs": 4})
    assert [list(llm.generate([PROMPTS[2]], greedy(LONG))[0].outputs[0].token_ids)] == [truth[2]]
    assert max(executor_of(llm).depths) == 3
    assert executor_of(llm).depths[-LONG // 2 :] == [1] * (LONG // 2)  # alone, it waits for nobody


@pytest.mark.parametrize("scheduler", ["fcfs", "priority"])
def test_little_memory_takes_nothing_from_a_step_in_flight(
    make_llm: Callable[..., LLM], truth: list[list[int]], scheduler: str
) -> None:
    """Requests give way, by swapping and by recomputing, while their step is in flight or not."""
    sections = LITTLE | {"scheduler": LITTLE["scheduler"] | {"name": scheduler}}
    params = greedy(LONG)
    alone = num_preemptions(make_llm(**sections).generate(PROMPTS, params))
    llm = make_llm(executor=late(), **sections)
    outputs = llm.generate(PROMPTS, params)
    assert [list(output.outputs[0].token_ids) for output in outputs] == truth
    assert max(executor_of(llm).depths) >= 2
    # Nobody gives way because others have their turn.
    assert 0 < num_preemptions(outputs) <= 2 * alone


def num_preemptions(outputs: list[RequestOutput]) -> int:
    return sum(output.metrics.num_preemptions for output in outputs)


NGRAM = {"drafters": {"lookup": {"name": "ngram", "num_tokens": 3, "min_match": 1, "length": "fixed"}}}
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(1, LONG)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        st.tuples(st.sampled_from(["abort", "hold", "resume", "land"]), st.integers(0, 9), st.just(0)),
    ),
    min_size=8,
    max_size=30,
)


@pytest.fixture(scope="module", params=[{}, {"speculative": NGRAM}], ids=["plain", "ngram"])
def little(request: pytest.FixtureRequest, tiny_llama: tuple[Path, Any]) -> Iterator[LLMEngine]:
    """Three stages, memory for two or three requests."""
    model = {"path": str(tiny_llama[0]), "tokenizer_mode": "none", "dtype": "float32", "max_model_len": 100}
    with LLM(**LITTLE | {"model": model, "executor": late(3)} | request.param) as llm:
        yield llm.engine


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(actions=ACTIONS)
def test_requests_come_and_go_at_any_time(
    little: LLMEngine, truth: list[list[int]], check_nothing_is_held: Callable[[LLMEngine], None], actions: list[Any]
) -> None:
    """They are aborted, held, preempted, and all steps are awaited, while several steps are in flight."""
    wanted: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}
    names = map(str, itertools.count())
    little.abort_request(little.request_ids)  # of an example that failed

    def step() -> None:
        got.update({output.request_id: list(output.outputs[0].token_ids) for output in little.step()})

    for action, number, count in actions:
        ids = little.request_ids
        chosen = ids[number % len(ids)] if ids else None
        if action == "add":
            request_id = next(names)
            little.add_request(request_id, PROMPTS[number], greedy(count))
            wanted[request_id] = truth[number][:count]
        elif action == "step":
            for _ in range(number):
                step()
        elif action == "land":
            little.pause("keep")
            little.resume()
        elif chosen is not None and action == "abort":
            little.abort_request(chosen)
            del wanted[chosen]
        elif chosen is not None and action == "hold":
            little.hold(chosen)
        elif chosen is not None and action == "resume":
            little.resume(chosen)
    little.resume(little.request_ids)
    while little.has_unfinished_requests() or little.core.has_work:
        step()
    assert {request_id: got[request_id] for request_id in wanted} == wanted
    check_nothing_is_held(little)
