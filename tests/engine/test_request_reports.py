"""What the engine knows of a request that runs, and for a while of one that has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dovetail import LLM, LLMEngine, SamplingParams
from dovetail.contracts.engine_client import RequestReport
from dovetail.contracts.grammar import CompiledGrammar
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.contracts.telemetry import GrammarStats, RequestStats, TelemetrySink

MakeLLM = Callable[..., LLM]
Value = TypeVar("Value")

PROMPT = [3 + 7 * i % 120 for i in range(18)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
NGRAM = {"drafters": {"lookup": {"name": "ngram", "num_tokens": 3, "min_match": 1, "length": "fixed"}}}


def run(engine: LLMEngine) -> None:
    while engine.is_runnable:
        engine.step()


def report(engine: LLMEngine, request_id: str) -> RequestReport:
    (found,) = engine.explain_request(request_id).requests
    return found


class Keeps(TelemetrySink):
    """What sinks are told, as an oracle."""

    contract = (1, 0)

    def __init__(self) -> None:
        super().__init__(PluginOptions())
        self.told: dict[str, RequestStats] = {}

    def on_request(self, stats: RequestStats) -> None:
        self.told[stats.request_id] = stats


def test_a_report_of_a_request_that_ended_is_what_sinks_are_told(make_llm: MakeLLM) -> None:
    engine, sink = make_llm(speculative=NGRAM).engine, Keeps()
    engine.keep_ended(10)
    engine.add_telemetry_sink(sink)
    engine.add_request("a", PROMPT, replace(GREEDY, max_tokens=40, speculation="lookup"))
    run(engine)
    found = report(engine, "a")
    assert found.state == "finished"
    assert found.stats == sink.told["a"]
    assert (found.stats.speculation, found.stats.drafter) == ("lookup", "lookup")
    assert found.stats.num_draft_rounds > 0


def test_the_ends_are_kept_without_any_sink_and_as_many_as_are_asked_for(make_llm: MakeLLM) -> None:
    engine = make_llm().engine
    engine.keep_ended(3)
    for index in range(5):
        engine.add_request(f"r{index}", PROMPT, GREEDY)
    run(engine)
    known = [f"r{index}" for index in range(5) if engine.explain_request(f"r{index}").requests]
    assert known == ["r2", "r3", "r4"]
    assert engine.explain_request("r0").num_kept == 3


def test_an_id_that_comes_again_is_the_last_one_to_end(make_llm: MakeLLM) -> None:
    engine = make_llm().engine
    engine.keep_ended(2)
    for request_id, num_tokens in (("a", 3), ("b", 4), ("a", 5), ("c", 6)):
        engine.add_request(request_id, PROMPT, replace(GREEDY, max_tokens=num_tokens))
        run(engine)
    assert not engine.explain_request("b").requests
    assert report(engine, "a").stats.num_generated_tokens == 5


def test_an_engine_that_nobody_asks_remembers_nothing(make_llm: MakeLLM) -> None:
    engine = make_llm().engine
    engine.add_request("a", PROMPT, GREEDY)
    run(engine)
    assert engine.explain_request("a").requests == ()


def test_an_id_leads_to_the_requests_whose_ids_go_on_behind_it(make_llm: MakeLLM) -> None:
    engine = make_llm().engine
    engine.keep_ended(10)
    for request_id in ("a-0", "ab-0", "a-1", "a"):
        engine.add_request(request_id, PROMPT, GREEDY)
    engine.step()
    engine.abort_request("a-0")
    found = [each.stats.request_id for each in engine.explain_request("a").requests]
    assert found == ["a-1", "a", "a-0"]
    run(engine)


def test_a_request_is_followed_from_the_queue_to_its_end(make_llm: MakeLLM) -> None:
    engine = make_llm(scheduler={"max_num_seqs": 1, "max_num_batched_tokens": 8}).engine
    engine.keep_ended(10)
    engine.add_request("first", PROMPT, GREEDY)
    engine.add_request("second", PROMPT, GREEDY)
    assert report(engine, "first").state == "waiting"
    states = []
    for _ in range(4):
        engine.step()
        states.append((report(engine, "first").state, report(engine, "first").stats.num_generated_tokens))
    assert states == [("running", 0), ("running", 0), ("running", 1), ("running", 2)]
    assert report(engine, "second").state == "waiting"
    assert report(engine, "second").stats.first_scheduled_time is None
    engine.hold("first")
    engine.step()
    assert report(engine, "first").state == "held"
    engine.resume("first")
    run(engine)
    first = report(engine, "first")
    assert (first.state, first.stats.finish_reason, first.stats.num_generated_tokens) == ("finished", "length", 12)


def test_cached_tokens_show_while_the_rest_of_the_prompt_is_computed(make_llm: MakeLLM) -> None:
    engine = make_llm(scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 8}).engine
    engine.add_request("a", PROMPT[:9], GREEDY)
    run(engine)
    engine.add_request("b", [*PROMPT[:9], *range(20, 60)], GREEDY)
    engine.step()
    found = report(engine, "b")
    assert (found.stats.num_cached_tokens, found.stats.first_token_time) == (8, None)
    run(engine)


def test_a_preempted_request_says_so(make_llm: MakeLLM) -> None:
    engine = make_llm(cache={"num_blocks": 12}, model={"max_model_len": 44}).engine
    engine.keep_ended(10)
    params = replace(GREEDY, max_tokens=24)
    for index in range(2):
        engine.add_request(f"r{index}", [index, *PROMPT[:12]], params)
    states = set()
    while engine.is_runnable:
        engine.step()
        states.add(report(engine, "r1").state)
    assert states == {"running", "preempted", "finished"}
    assert report(engine, "r1").stats.num_preemptions >= 1
    assert report(engine, "r0").stats.num_preemptions == 0


def test_what_else_came_with_a_request_shows(make_llm: MakeLLM) -> None:
    engine = make_llm(scheduler={"name": "priority"}, speculative=NGRAM).engine
    params = replace(GREEDY, speculation="off", prompt_logprobs=0)
    engine.add_request("a", PROMPT, params, priority=7, cache_salt="secret")
    engine.add_request("b", PROMPT, GREEDY)
    a, b = report(engine, "a").stats, report(engine, "b").stats
    assert (a.priority, a.is_salted, a.has_prompt_logprobs, a.speculation, a.drafter) == (7, True, True, "off", None)
    assert (b.priority, b.is_salted, b.has_prompt_logprobs, b.speculation) == (0, False, False, None)
    assert "secret" not in repr(engine.explain_request("a"))
    run(engine)


def test_a_grammar_is_compiled_for_the_first_request_that_has_it(story_model: Path) -> None:
    model = {"path": str(story_model), "dtype": "float32", "hf_overrides": {"eos_token_id": 2}}
    form = SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputs(regex="[0-9]{3}"))
    with LLM(model=model, cache={"num_blocks": 200}, executor={"threads": 1}) as llm:
        engine = llm.engine
        engine.keep_ended(10)
        engine.add_request("first", "Once", form)
        finish(engine)
        engine.add_request("second", "Once", form)
        finish(engine)
        first, second = (report(engine, name).stats.grammar for name in ("first", "second"))
    assert first is not None
    assert second is not None
    assert (first.form, first.was_compiled, second.was_compiled) == ("regex", False, True)
    assert first.wait is not None
    assert second.wait is not None


def test_a_request_whose_grammar_is_not_there_yet_says_so(story_model: Path) -> None:
    model = {"path": str(story_model), "dtype": "float32", "hf_overrides": {"eos_token_id": 2}}
    form = SamplingParams(structured_outputs=StructuredOutputs(choice=["a", "b"]))
    with LLM(model=model, cache={"num_blocks": 200}, executor={"threads": 1}) as llm:
        engine = llm.engine
        compiled: Future[CompiledGrammar] = Future()
        compiler = engine.tokens._parts.grammars.compiler
        assert compiler is not None
        compiler._compiled[StructuredOutputs(choice=["a", "b"]).spec] = compiled  # one that takes for ever
        engine.add_request("a", "Once", form)
        found = report(engine, "a")
        engine.abort_request("a")
    assert found.state == "compiling"
    assert found.stats.grammar == GrammarStats(form="choice", was_compiled=False, wait=None)


def finish(engine: LLMEngine) -> None:
    """Steps to the end, with waits for grammars."""
    while engine.has_unfinished_requests():
        with engine.wakeup:
            assert engine.wakeup.wait_for(lambda: engine.is_runnable, timeout=60)
        engine.step()


def test_a_report_can_be_asked_for_while_another_thread_is_in_the_engine(make_llm: MakeLLM) -> None:
    engine = make_llm().engine
    engine.keep_ended(4)
    failures: list[BaseException] = []
    is_over = threading.Event()

    def ask() -> None:
        try:
            while not is_over.is_set():
                for index in range(40):
                    found = engine.explain_request(f"r{index}").requests
                    assert len(found) <= 1
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for index in range(40):
            engine.add_request(f"r{index}", PROMPT, replace(GREEDY, max_tokens=1 + index % 5))
        run(engine)
    finally:
        is_over.set()
        thread.join()
    assert failures == []
    assert len(engine.explain_request("r39").requests) == 1


def test_a_report_needs_no_turn_in_the_engine(make_llm: MakeLLM) -> None:
    engine = make_llm().engine
    engine.add_request("a", PROMPT, GREEDY)
    with engine.use:
        found = call_elsewhere(lambda: engine.explain_request("a"))
    assert [each.state for each in found.requests] == ["waiting"]
    run(engine)


def call_elsewhere(function: Callable[[], Value]) -> Value:
    """What a function returns or raises in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(60)
