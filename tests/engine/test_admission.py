"""A request that is not taken in leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, LLMEngine, SamplingParams
from dovetail.contracts.errors import PluginError, RequestError

REFUSING = """
from dovetail.schedulers.fcfs import FCFSScheduler

class Refusing(FCFSScheduler):
    num_added_before = 0

    def add(self, request):
        super().add(request)
        if request.request_id == "late" and not request.num_computed_tokens and self.num_added_before:
            raise RuntimeError("no more of these")
        if request.request_id == "never":
            raise RuntimeError("not this one")
        self.num_added_before += 1
"""
GREEDY = SamplingParams(temperature=0, max_tokens=3)
SEVERAL = SamplingParams(temperature=1, max_tokens=3, n=3, bad_words=[])


@pytest.mark.parametrize("order", [{"priority": "x"}, {"priority": 1.5}, {"priority": True}, {"arrival_time": "x"}])
@pytest.mark.parametrize("params", [GREEDY, SEVERAL])
def test_an_order_that_cannot_be(
    make_llm: Callable[..., LLM],
    check_nothing_is_held: Callable[[LLMEngine], None],
    order: dict[str, Any],
    params: SamplingParams,
) -> None:
    engine = make_llm(scheduler={"name": "priority"}).engine
    for asked in (order, {"arrival_time": float("nan")}):
        with pytest.raises(RequestError, match="must be"):
            engine.add_request("a", [5, 6], params, **asked)
    check_nothing_is_held(engine)
    engine.sleep()


@pytest.mark.parametrize("params", [GREEDY, SEVERAL])
def test_a_scheduler_that_raises(
    make_llm: Callable[..., LLM],
    check_nothing_is_held: Callable[[LLMEngine], None],
    hf_greedy: Callable[..., Any],
    tmp_path: Path,
    params: SamplingParams,
) -> None:
    (tmp_path / "refusing.py").write_text(REFUSING)
    llm = make_llm(scheduler={"name": f"{tmp_path}/refusing.py:Refusing"})
    engine = llm.engine
    engine.add_request("a", [5, 6], GREEDY)
    with pytest.raises(PluginError, match="scheduler Refusing raised RuntimeError: not this one"):
        engine.add_request("never", [5, 6], params)
    assert engine.request_ids == ["a"]
    assert engine.step()[0].outputs[0].token_ids == hf_greedy([5, 6], 1)
    engine.abort_request("a")
    check_nothing_is_held(engine)
    engine.sleep()


def test_a_scheduler_that_refuses_a_sibling_ends_its_request_and_no_other(
    make_llm: Callable[..., LLM],
    check_nothing_is_held: Callable[[LLMEngine], None],
    hf_greedy: Callable[..., Any],
    tmp_path: Path,
) -> None:
    (tmp_path / "refusing.py").write_text(REFUSING)
    engine = make_llm(scheduler={"name": f"{tmp_path}/refusing.py:Refusing"}).engine
    engine.add_request("late", [5, 6], SEVERAL)
    engine.add_request("a", [7, 8], GREEDY)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    assert "no more of these" in str(outputs["late"].error)
    tokens = outputs["a"].outputs[0].token_ids
    assert tokens == hf_greedy([7, 8], len(tokens))
    check_nothing_is_held(engine)
    engine.sleep()


def test_one_that_waits_for_its_siblings_prompt_is_aborted_without_entering_the_queue(
    make_llm: Callable[..., LLM], check_nothing_is_held: Callable[[LLMEngine], None], tmp_path: Path
) -> None:
    (tmp_path / "refusing.py").write_text(REFUSING)
    engine = make_llm(scheduler={"name": f"{tmp_path}/refusing.py:Refusing"}).engine
    engine.add_request("late", [5, 6], SEVERAL)
    assert engine.abort_request("late")[0].finished
    check_nothing_is_held(engine)
