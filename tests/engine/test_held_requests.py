"""Requests that are held: they compute nothing, keep what they have, and give the same tokens once they are resumed."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail import LLM, AsyncLLMEngine, LLMEngine, SamplingParams
from dovetail.contracts.errors import PluginError, RequestError, WorkerError
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.scheduler import RequestStatus, Schedule
from dovetail.contracts.step import StepPlan
from dovetail.contracts.telemetry import RequestStats, TelemetrySink
from dovetail.engine.sequence import Sequence
from dovetail.engine.step import Step, may_follow
from dovetail.testing.local_plugins import write_distribution

MakeLLM = Callable[..., LLM]
Greedy = Callable[[list[int], int], list[int]]

PROMPTS = [[3 + 7 * i % 120 for i in range(length)] for length in (9, 14, 22)]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
NGRAM = {"drafters": {"lookup": {"name": "ngram", "num_tokens": 3, "min_match": 1, "length": "fixed"}}}
TIGHT = {"scheduler": {"max_num_batched_tokens": 24, "max_num_seqs": 4}, "model": {"max_model_len": 44}}
"""With 12 blocks of 4 tokens, memory for one request and a half."""


class Ends(TelemetrySink):
    """Which requests have ended."""

    contract = (1, 0)

    def __init__(self) -> None:
        self._ended: set[str] = set()
        self._changed = threading.Condition()

    def on_request(self, stats: RequestStats) -> None:
        with self._changed:
            self._ended.add(stats.request_id)
            self._changed.notify_all()

    def wait(self, request_id: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: request_id in self._ended, timeout=60)


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Steps until nothing is left to do; the last outputs."""
    outputs = {}
    while engine.is_runnable:
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
    return outputs


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def steps_until(engine: LLMEngine, request_id: str, num_tokens: int) -> None:
    while engine.token_progress([request_id]).num_output_tokens < num_tokens:
        engine.step()


def test_a_held_request_is_passed_over_and_goes_on(make_llm: MakeLLM, hf_greedy: Greedy) -> None:
    engine = make_llm().engine
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, GREEDY)
    steps_until(engine, "1", 3)
    engine.hold("1")
    (sequence,) = engine.tokens._requests.sequences("1")
    outputs = run(engine)
    assert set(outputs) == {"0", "2"}
    assert sequence.num_output_tokens == 3
    assert engine.step() == []
    assert engine.has_unfinished_requests()
    engine.resume("1")
    outputs |= run(engine)
    for index, prompt in enumerate(PROMPTS):
        assert tokens_of(outputs[str(index)]) == [hf_greedy(prompt, NUM_TOKENS)]


def test_nothing_is_computed_while_all_are_held(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_llm().engine
    engine.add_request("a", PROMPTS[0], GREEDY)
    engine.hold(["a", "unknown"])
    monkeypatch.setattr(engine.tokens._parts.executor, "execute", lambda plan: pytest.fail("a step was handed over"))
    assert engine.is_runnable  # to take note of the hold
    assert [engine.step(), engine.step()] == [[], []]
    assert not engine.is_runnable
    assert (engine.core.num_running, engine.core.num_waiting) == (0, 1)
    engine.abort_request("a")


def test_a_hold_is_of_the_request_that_had_the_id_then(make_llm: MakeLLM, hf_greedy: Greedy) -> None:
    engine = make_llm().engine
    engine.hold("a")
    engine.add_request("a", PROMPTS[0], GREEDY)
    engine.step()
    engine.hold("a")
    engine.abort_request("a")
    engine.add_request("a", PROMPTS[1], GREEDY)
    assert tokens_of(run(engine)["a"]) == [hf_greedy(PROMPTS[1], NUM_TOKENS)]


def test_what_is_no_id_is_refused(make_llm: MakeLLM) -> None:
    engine = make_llm().engine
    for call in (engine.hold, engine.resume):
        with pytest.raises(RequestError, match="a request id is a string that is not empty"):
            call([3])  # type: ignore[list-item]


@pytest.mark.parametrize("started", [False, True])
def test_a_held_request_can_be_aborted(make_llm: MakeLLM, started: bool) -> None:
    engine = make_llm().engine
    engine.add_request("a", PROMPTS[0], GREEDY)
    if started:
        steps_until(engine, "a", 2)
    engine.hold("a")
    engine.step()
    (output,) = engine.abort_request("a")
    assert [completion.finish_reason for completion in output.outputs] == ["abort"]
    assert not engine.has_unfinished_requests()
    assert engine.cache_statistics().num_used_blocks == 0


def test_sleeping_is_refused_while_a_request_is_held(make_llm: MakeLLM) -> None:
    engine = make_llm().engine
    engine.add_request("a", PROMPTS[0], GREEDY)
    engine.hold("a")
    engine.step()
    with pytest.raises(RequestError, match="while requests are unfinished, held ones included"):
        engine.sleep()
    engine.abort_request("a")
    engine.sleep()
    engine.wake_up()


@pytest.mark.parametrize("cache", [{}, {"swap_gib": 0.001}], ids=["recompute", "swap"])
def test_others_get_the_blocks_of_a_held_request(make_llm: MakeLLM, hf_greedy: Greedy, cache: dict[str, Any]) -> None:
    engine = make_llm(**TIGHT, cache={"num_blocks": 13, **cache}).engine
    engine.add_request("held", PROMPTS[2], GREEDY)
    steps_until(engine, "held", 4)
    engine.hold("held")
    engine.add_request("other", PROMPTS[1][::-1], GREEDY)
    outputs = run(engine)
    assert tokens_of(outputs["other"]) == [hf_greedy(PROMPTS[1][::-1], NUM_TOKENS)]
    engine.resume("held")
    output = run(engine)["held"]
    assert tokens_of(output) == [hf_greedy(PROMPTS[2], NUM_TOKENS)]
    assert output.metrics.num_preemptions == 1
    assert (engine.cache_statistics().num_swapped_out_blocks > 0) == bool(cache)


def test_others_find_the_prefix_of_a_held_request(make_llm: MakeLLM, hf_greedy: Greedy) -> None:
    engine = make_llm().engine
    engine.add_request("held", PROMPTS[2], GREEDY)
    steps_until(engine, "held", 1)
    engine.hold("held")
    engine.add_request("other", PROMPTS[2], GREEDY)
    output = run(engine)["other"]
    assert output.num_cached_tokens == 20
    assert tokens_of(output) == [hf_greedy(PROMPTS[2], NUM_TOKENS)]
    engine.resume("held")
    assert tokens_of(run(engine)["held"]) == [hf_greedy(PROMPTS[2], NUM_TOKENS)]


def test_one_that_is_held_in_its_prompt_lets_others_with_that_prefix_pass(make_llm: MakeLLM, hf_greedy: Greedy) -> None:
    """They do not wait for blocks that nobody computes."""
    engine = make_llm(scheduler={"max_num_batched_tokens": 8, "max_num_seqs": 8}).engine
    engine.add_request("held", PROMPTS[2], GREEDY)
    engine.step()
    engine.hold("held")
    engine.add_request("other", PROMPTS[2], GREEDY)
    assert tokens_of(run(engine)["other"]) == [hf_greedy(PROMPTS[2], NUM_TOKENS)]
    engine.abort_request("held")


def test_a_held_request_keeps_its_draft(make_llm: MakeLLM, hf_greedy: Greedy) -> None:
    prompt = [5, 6, 7, 5, 6, 7, 5, 6, 7]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine = make_llm(speculative=NGRAM).engine
    engine.add_request("held", prompt, params)
    engine.add_request("other", PROMPTS[0], GREEDY)
    (sequence,) = engine.tokens._requests.sequences("held")
    while not sequence.num_draft_tokens:
        engine.step()
    engine.hold("held")
    kept = sequence.num_draft_tokens
    run(engine)
    assert sequence.num_draft_tokens == kept

    def num_drafted() -> int:
        return sum(totals.num_drafted for totals in engine.speculation_totals().values())

    before = num_drafted()
    engine.resume("held")
    outputs = {output.request_id: output for output in engine.step()}
    assert num_drafted() == before + kept
    outputs |= run(engine)
    assert tokens_of(outputs["held"]) == [hf_greedy(prompt, 40)]


@pytest.mark.parametrize("when", ["before it starts", "in its prompt", "with its siblings"])
def test_all_completions_of_a_request_are_held(make_llm: MakeLLM, when: str) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=8, ignore_eos=True)
    llm = make_llm(scheduler={"max_num_batched_tokens": 8, "max_num_seqs": 8})
    expected = tokens_of(llm.generate([PROMPTS[2]], params)[0])
    engine = llm.engine
    engine.reset_prefix_cache()
    engine.add_request("a", PROMPTS[2], params)
    for _ in range({"before it starts": 0, "in its prompt": 1, "with its siblings": 6}[when]):
        engine.step()
    engine.hold("a")
    assert run(engine) == {}
    engine.resume("a")
    assert tokens_of(run(engine)["a"]) == expected


EVENTS = st.lists(st.tuples(st.sampled_from(["hold", "resume", "step", "step"]), st.integers(0, 2)), max_size=40)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"cache": {"num_blocks": 13}, **TIGHT},
        {"cache": {"num_blocks": 13, "swap_gib": 0.001}, **TIGHT},
        {"speculative": NGRAM},
        {"executor": {"name": "gpu", "device": "null", "null_order": "late"}},
        {"executor": {"name": "gpu", "device": "null"}, "cache": {"num_blocks": 13, "swap_gib": 0.001}, **TIGHT},
    ],
    ids=["ample", "recompute", "swap", "speculation", "two in flight", "two in flight, swap"],
)
def test_whatever_is_held_and_resumed_the_tokens_are_the_same(
    make_llm: MakeLLM,
    hf_greedy: Greedy,
    check_nothing_is_held: Callable[[LLMEngine], None],
    sections: dict[str, Any],
) -> None:
    engine = make_llm(**sections).engine

    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(events=EVENTS)
    def check(events: list[tuple[str, int]]) -> None:
        outputs: dict[str, RequestOutput] = {}
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(str(index), prompt, GREEDY)
        for event, index in events:
            if event == "step":
                outputs |= {output.request_id: output for output in engine.step()}
            else:
                (engine.hold if event == "hold" else engine.resume)(str(index))
        engine.resume(["0", "1", "2"])
        outputs |= run(engine)
        for index, prompt in enumerate(PROMPTS):
            assert tokens_of(outputs[str(index)]) == [hf_greedy(prompt, NUM_TOKENS)]
        check_nothing_is_held(engine)

    check()


def flight(*sequences: Sequence) -> Step:
    counts = [1] * len(sequences)
    plan = StepPlan(step_id=1, seq_ids=[sequence.seq_id for sequence in sequences], num_tokens=counts)
    step = Step(Schedule(list(sequences), counts), plan, [], 0.0)
    step.future = Future()
    return step


def test_no_step_follows_several_of_which_the_last_passed_a_request_over() -> None:
    """Its last token is known neither to the host nor, after a step without it, to the workers."""
    first, second = (Sequence(seq_id, str(seq_id), PROMPTS[0], GREEDY) for seq_id in range(2))
    for sequence in (first, second):
        sequence.status = RequestStatus.RUNNING
    assert may_follow(deque([flight(first, second), flight(first, second)]))
    assert may_follow(deque([flight(first), flight(first, second)]))
    assert not may_follow(deque([flight(first, second), flight(first)]))
    second.status = RequestStatus.FINISHED
    assert may_follow(deque([flight(first, second), flight(first)]))


GATE = """
from dovetail.contracts.hooks import hookimpl

waiting = {}

@hookimpl
def dovetail_request_added(request_id, params, control):
    name = params.extra.get("waits_for")
    if name is not None:
        control.hold(request_id)
        waiting.setdefault(name, []).append((request_id, control))

def open_gate(name):
    for request_id, control in waiting.pop(name):
        control.resume(request_id)
"""
"""A plugin of somebody else: requests that wait for something are held until it is there."""


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    write_distribution(
        tmp_path,
        "gate",
        entry_points={"dovetail.hooks.v1": {"gate": "gate_for_requests"}},
        modules={"gate_for_requests.py": GATE},
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import gate_for_requests  # type: ignore[import-not-found]

    gate_for_requests.waiting.clear()
    return gate_for_requests


WAITING = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, extra={"waits_for": "the adapter"})


def test_generate_waits_for_a_plugin_that_holds_a_request(make_llm: MakeLLM, hf_greedy: Greedy, gate: Any) -> None:
    llm, ends = make_llm(), Ends()
    llm.engine.add_telemetry_sink(ends)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, PROMPTS[:2], [WAITING, GREEDY])
        ends.wait("1")
        assert not call.done()
        gate.open_gate("the adapter")
        outputs = call.result(timeout=60)
    assert [tokens_of(output) for output in outputs] == [[hf_greedy(prompt, NUM_TOKENS)] for prompt in PROMPTS[:2]]


def sleeps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a thread waits for the engine to have something to do."""
    wakeup, begun = llm.engine.wakeup, threading.Event()
    wait_for = wakeup.wait_for

    def watched(*arguments: Any) -> bool:
        begun.set()
        return wait_for(*arguments)

    monkeypatch.setattr(wakeup, "wait_for", watched)
    return begun


def test_a_thread_whose_request_is_held_runs_the_steps_of_others(
    make_llm: MakeLLM, hf_greedy: Greedy, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    sleeping = sleeps(llm, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, [PROMPTS[0]], WAITING)
        assert sleeping.wait(60)
        (output,) = llm.generate([PROMPTS[1]], GREEDY)
        assert tokens_of(output) == [hf_greedy(PROMPTS[1], NUM_TOKENS)]
        gate.open_gate("the adapter")
        assert tokens_of(call.result(timeout=60)[0]) == [hf_greedy(PROMPTS[0], NUM_TOKENS)]


@pytest.mark.parametrize("others", [False, True])
def test_generate_ends_when_its_held_request_is_aborted(
    make_llm: MakeLLM, gate: Any, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    """Also where other requests are held on."""
    llm = make_llm()
    sleeping = sleeps(llm, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, [PROMPTS[0]], WAITING)
        assert sleeping.wait(60)
        if others:
            llm.engine.add_request("other", PROMPTS[1], WAITING)
        llm.engine.abort_request("0")
        with pytest.raises(RequestError, match="0 ended without a last output: something else aborted it"):
            call.result(timeout=60)
    llm.engine.abort_request("other")


def test_generate_ends_at_a_shutdown(make_llm: MakeLLM, gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    sleeping = sleeps(llm, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, [PROMPTS[0]], WAITING)
        assert sleeping.wait(60)
        llm.shutdown()
        with pytest.raises(WorkerError, match="was shut down while requests were held"):
            call.result(timeout=60)


async def last_output(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


def test_the_thread_of_an_async_engine_sleeps_while_all_are_held(
    make_llm: MakeLLM, hf_greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = make_llm().engine
    steps = []
    step, is_held = inner.step, threading.Event()

    def few_steps() -> list[RequestOutput]:
        """The request cannot end before it is held, however late this test's loop goes on."""
        if len(steps) == 3 and not is_held.is_set():
            return []
        steps.append(1)
        return step()

    monkeypatch.setattr(inner, "step", few_steps)

    async def check(engine: AsyncLLMEngine) -> None:
        stream = engine.generate(PROMPTS[0], GREEDY, "a")
        first = await anext(stream)
        await engine.hold("a")
        is_held.set()
        while inner.is_runnable:
            await engine.cache_statistics()
        num_steps = len(steps)
        for _ in range(20):  # the thread runs each, and looks whether there is a step to run
            await engine.cache_statistics()
        assert len(steps) == num_steps
        held = inner.token_progress(["a"]).num_output_tokens
        assert len(first.outputs[0].token_ids) <= held <= 3
        await engine.resume("a")
        assert tokens_of(await last_output(stream)) == [hf_greedy(PROMPTS[0], NUM_TOKENS)]

    with AsyncLLMEngine(inner) as engine:
        asyncio.run(check(engine))


def test_a_plugin_resumes_a_stream_from_a_thread_of_its_own(make_llm: MakeLLM, hf_greedy: Greedy, gate: Any) -> None:
    async def check(engine: AsyncLLMEngine) -> None:
        held = asyncio.create_task(last_output(engine.generate(PROMPTS[0], WAITING)))
        other = await last_output(engine.generate(PROMPTS[1], GREEDY))
        assert tokens_of(other) == [hf_greedy(PROMPTS[1], NUM_TOKENS)]
        while not gate.waiting:
            await engine.cache_statistics()
        threading.Thread(target=gate.open_gate, args=["the adapter"]).start()
        assert tokens_of(await held) == [hf_greedy(PROMPTS[0], NUM_TOKENS)]

    with AsyncLLMEngine(make_llm().engine) as engine:
        asyncio.run(check(engine))


def test_a_stream_that_is_held_ends_when_it_is_left(make_llm: MakeLLM, gate: Any) -> None:
    async def check(engine: AsyncLLMEngine) -> None:
        task = asyncio.create_task(last_output(engine.generate(PROMPTS[0], WAITING)))
        while not gate.waiting:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.cache_statistics()
        assert engine._engine.request_ids == []

    with AsyncLLMEngine(make_llm().engine) as engine:
        asyncio.run(check(engine))


FAULTY = """
from dovetail.contracts.scheduler import RequestStatus, Schedule, Scheduler
from dovetail.schedulers.fcfs import FCFSScheduler


class SchedulesHeld(FCFSScheduler):
    def schedule(self, memory):
        for request in self._waiting.requests:
            if request.is_held:
                memory.attach_prefix(request)
                return Schedule([request], [memory.grant(request, 1)])
        return super().schedule(memory)
"""


def test_a_scheduler_that_schedules_a_held_request_is_named(make_llm: MakeLLM, tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY)
    engine = make_llm(scheduler=f"{tmp_path}/faulty.py:SchedulesHeld").engine
    engine.add_request("a", PROMPTS[0], GREEDY)
    engine.hold("a")
    words = "SchedulesHeld breaks the scheduler's contract: request a is scheduled although it is held"
    with pytest.raises(PluginError, match=words):
        engine.step()
    assert engine.request_ids == []
