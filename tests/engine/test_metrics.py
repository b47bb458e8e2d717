"""What telemetry sinks are told of the engine's state, of requests' ends and of their traces, and `metrics`."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dovetail import LLM, AsyncLLMEngine, SamplingParams
from dovetail.contracts.errors import ConfigError, PluginError, RequestError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.telemetry import (
    EngineDescription,
    EngineState,
    Exposes,
    Exposition,
    RequestStats,
    StepStats,
    TelemetrySink,
)

MakeLLM = Callable[..., LLM]
LONG = SamplingParams(max_tokens=6, ignore_eos=True)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorder(Exposes):
    """Keeps all that it is told."""

    contract = (1, 0)

    def __init__(self) -> None:
        super().__init__(PluginOptions())
        self.engines: list[EngineDescription] = []
        self.steps: list[StepStats] = []
        self.requests: dict[str, RequestStats] = {}
        self.states: list[EngineState] = []

    def on_start(self, engine: EngineDescription) -> None:
        self.engines.append(engine)

    def on_step(self, stats: StepStats) -> None:
        self.steps.append(stats)

    def on_request(self, stats: RequestStats) -> None:
        self.requests[stats.request_id] = stats

    def exposition(self, state: EngineState) -> Exposition:
        self.states.append(state)
        return Exposition(content_type="text/plain", body=f"{len(self.states)}".encode())


class Raises(TelemetrySink):
    """Raises at every step."""

    contract = (1, 0)
    closed = 0

    def on_step(self, stats: StepStats) -> None:
        raise OSError("disk full")

    def close(self) -> None:
        self.closed += 1


def with_recorder(llm: LLM) -> Recorder:
    recorder = Recorder()
    llm.engine.add_telemetry_sink(recorder)
    return recorder


def run_all(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def test_sinks_learn_what_the_engine_is_and_of_another_kv_memory(make_llm: MakeLLM) -> None:
    llm = make_llm()
    recorder = with_recorder(llm)
    llm.engine.initialize_cache(300)
    before, after = recorder.engines
    assert (before.block_size, before.num_blocks, before.max_model_len) == (4, 399, 256)
    assert (before.kv_dtype, before.prefix_caching, before.drafter) == ("float32", True, None)
    assert before.model == str(llm.engine.config.model.files.path)
    assert after.num_blocks == 299


def test_the_state_is_that_of_now_between_steps_too(make_llm: MakeLLM) -> None:
    llm = make_llm()
    recorder = with_recorder(llm)
    for name in ("a", "b"):
        llm.engine.add_request(name, [5, 6, 7], LONG)
    llm.engine.metrics()
    llm.engine.step()
    llm.engine.metrics()
    llm.engine.abort_request(["a", "b"])
    llm.engine.metrics()  # no step follows, and none is needed
    queued, running, ended = recorder.states
    assert (queued.num_running, queued.num_waiting) == (0, 2)
    assert (running.num_running, running.num_waiting) == (2, 0)
    assert running.kv_blocks_used > 0
    assert (ended.num_running, ended.num_waiting, ended.kv_blocks_used) == (0, 0, 0)


def test_the_state_has_weights_sleep_and_drafts(make_llm: MakeLLM) -> None:
    llm = make_llm(speculative={"drafters": {"lookup": {"name": "ngram", "min_match": 1, "length": "fixed"}}})
    recorder = with_recorder(llm)
    llm.generate([[5, 6, 7] * 5], SamplingParams(max_tokens=20, temperature=0.0), use_tqdm=False)
    llm.sleep(2)
    llm.engine.metrics()
    llm.wake_up(new_weights=True)
    llm.engine.metrics()
    asleep, awake = recorder.states
    assert (asleep.is_asleep, asleep.weight_version) == (True, 0)
    assert (awake.is_asleep, awake.weight_version) == (False, 1)
    totals = llm.engine.speculation_totals()["lookup"]
    assert awake.drafters["lookup"].num_drafted == totals.num_drafted > 0
    assert awake.drafters["lookup"].accepted_per_position == tuple(totals.accepted_per_position)


def test_each_first_token_is_told_once_with_its_latency(make_llm: MakeLLM) -> None:
    llm = make_llm()
    recorder = with_recorder(llm)
    llm.engine.add_request("two", [5, 6], SamplingParams(n=2, seed=1, max_tokens=4, ignore_eos=True))
    llm.engine.add_request("one", [5, 6], LONG)
    run_all(llm)
    latencies = sorted(first.latency for step in recorder.steps for first in step.first_tokens)
    expected = sorted(
        stats.first_token_time - stats.arrival_time
        for stats in recorder.requests.values()
        if stats.first_token_time is not None
    )
    assert len(latencies) == 2
    assert latencies == pytest.approx(expected)


def test_decoded_sequences_are_those_with_tokens_behind_their_first(make_llm: MakeLLM) -> None:
    llm = make_llm()
    recorder = with_recorder(llm)
    llm.engine.add_request("long", list(range(3, 60)), LONG)
    llm.engine.add_request("short", [5, 6], LONG)
    run_all(llm)
    assert sum(step.num_decoded for step in recorder.steps) == 2 * (6 - 1)


def test_the_end_of_a_request_says_what_was_asked(make_llm: MakeLLM) -> None:
    llm = make_llm()
    recorder = with_recorder(llm)
    params = SamplingParams(n=2, max_tokens=3, temperature=0.5, top_p=0.9, seed=1)
    headers = {"TraceParent": PARENT, "tracestate": "a=b", "authorization": "secret"}
    llm.engine.add_request("r", [5, 6], params, trace_headers=headers)
    run_all(llm)
    stats = recorder.requests["r"]
    assert (stats.n, stats.max_tokens, stats.temperature, stats.top_p) == (2, 3, 0.5, 0.9)
    assert stats.trace_context == {"traceparent": PARENT, "tracestate": "a=b"}
    assert (stats.error_type, stats.weight_version, stats.adapter) == (None, 0, "")


def test_a_request_that_was_never_scheduled_has_no_time_of_it(make_llm: MakeLLM) -> None:
    llm = make_llm()
    recorder = with_recorder(llm)
    llm.engine.add_request("r", [5, 6], LONG)
    llm.engine.abort_request("r")
    assert recorder.requests["r"].first_scheduled_time is None
    assert recorder.requests["r"].finish_reason == "abort"


def test_a_failed_request_has_the_class_of_its_error(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    recorder = with_recorder(llm)
    executor = llm.engine.tokens._parts.executor

    def fail(*_: object) -> None:
        raise ArithmeticError("no luck")

    llm.engine.add_request("r", [5, 6], LONG)
    monkeypatch.setattr(executor, "execute", fail)
    llm.engine.step()
    assert (recorder.requests["r"].finish_reason, recorder.requests["r"].error_type) == ("error", "ArithmeticError")


@pytest.mark.parametrize("headers", ["traceparent", ["traceparent"], {"traceparent": 1}, {1: "x"}])
def test_headers_that_are_none_are_refused(make_llm: MakeLLM, headers: object) -> None:
    engine = make_llm().engine
    with pytest.raises(RequestError, match="trace_headers must"):
        engine.add_request("r", [5, 6], trace_headers=headers)  # type: ignore[arg-type]
    assert not engine.has_unfinished_requests()


def test_nobody_exposes(make_llm: MakeLLM) -> None:
    llm = make_llm(telemetry=["log"])
    with pytest.raises(ConfigError, match=r"no telemetry sink .* as in telemetry: \[prometheus\]"):
        llm.engine.metrics()


def test_metrics_do_not_wait_for_the_step_that_runs(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of another thread hangs in the executor; a thread that entered the engine would be refused or wait."""
    llm = make_llm()
    with_recorder(llm)
    execute = llm.engine.tokens._parts.executor.execute
    entered, go_on = threading.Event(), threading.Event()

    def hang(*args: object) -> object:
        entered.set()
        assert go_on.wait(60)
        return execute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine.tokens._parts.executor, "execute", hang)
    llm.engine.add_request("r", [5, 6], LONG)
    thread = threading.Thread(target=llm.engine.step)
    thread.start()
    assert entered.wait(60)
    assert llm.engine.metrics().body == b"1"
    go_on.set()
    thread.join(60)
    run_all(llm)


def test_a_sink_that_raises_is_switched_off_once_and_the_state_says_so(
    make_llm: MakeLLM, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm()
    broken = Raises(PluginOptions())
    llm.engine.add_telemetry_sink(broken)
    recorder = with_recorder(llm)
    with caplog.at_level(logging.ERROR):
        llm.generate([[5, 6]], LONG, use_tqdm=False)
    assert caplog.messages == ["telemetry sink Raises raised and is switched off"]
    assert broken.closed == 1
    llm.engine.metrics()
    assert {sink.name: sink.is_on for sink in recorder.states[0].sinks} == {"Raises": False, "Recorder": True}
    assert all(sink.seconds > 0 for sink in recorder.states[0].sinks)
    assert len(recorder.steps) == 6


def test_an_exposition_that_raises_is_the_readers_error_alone(make_llm: MakeLLM) -> None:
    llm = make_llm()
    recorder = with_recorder(llm)
    recorder.states = None  # type: ignore[assignment]
    with pytest.raises(PluginError, match="telemetry sink Recorder cannot render its metrics: AttributeError"):
        llm.engine.metrics()
    recorder.states = []
    assert llm.engine.metrics().body == b"1"


def test_a_sink_that_was_switched_off_exposes_nothing(make_llm: MakeLLM) -> None:
    llm = make_llm()
    recorder = with_recorder(llm)
    recorder.steps = None  # type: ignore[assignment]
    llm.generate([[5, 6]], LONG, use_tqdm=False)
    with pytest.raises(PluginError, match="telemetry sink Recorder raised and was switched off"):
        llm.engine.metrics()


class Fixed(Exposes):
    """Exposes one page."""

    contract = (1, 0)

    def __init__(self, content_type: str, body: bytes) -> None:
        super().__init__(PluginOptions())
        self.page = Exposition(content_type=content_type, body=body)

    def exposition(self, state: EngineState) -> Exposition:
        return self.page


OPEN = "application/openmetrics-text; version=1.0.0"


def test_all_sinks_that_expose_are_on_one_page(make_llm: MakeLLM) -> None:
    llm = make_llm(telemetry=["prometheus"])
    alone = llm.engine.metrics()
    llm.engine.add_telemetry_sink(Fixed("text/plain; version=0.0.4", b"# TYPE mine gauge\nmine 1"))
    page = llm.engine.metrics()
    assert page.content_type == alone.content_type
    families = {family.name for family in text_string_to_metric_families(page.body.decode())}
    assert families == {family.name for family in text_string_to_metric_families(alone.body.decode())} | {"mine"}


def test_pages_of_openmetrics_end_once(make_llm: MakeLLM) -> None:
    llm = make_llm()
    for name in ("a", "b"):
        page = f"# TYPE {name} gauge\n{name} 1\n# EOF\n"
        llm.engine.add_telemetry_sink(Fixed(OPEN, page.encode()))
    assert llm.engine.metrics().body == b"# TYPE a gauge\na 1\n# TYPE b gauge\nb 1\n# EOF\n"


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (Fixed(OPEN, b"# EOF\n"), "sinks prometheus and Fixed expose metrics in formats"),
        (
            Fixed("text/plain; version=0.0.4", b"# TYPE vllm:num_requests_running gauge\n"),
            "sinks prometheus and Fixed both expose the metric vllm:num_requests_running",
        ),
    ],
)
def test_pages_that_make_none_together_are_refused_by_name(make_llm: MakeLLM, sink: Fixed, message: str) -> None:
    llm = make_llm(telemetry=["prometheus"])
    llm.engine.add_telemetry_sink(sink)
    with pytest.raises(PluginError, match=message):
        llm.engine.metrics()


def test_a_sink_that_was_switched_off_hides_no_other(make_llm: MakeLLM) -> None:
    llm = make_llm(telemetry=["prometheus"])
    recorder = with_recorder(llm)
    recorder.steps = None  # type: ignore[assignment]
    llm.generate([[5, 6]], LONG, use_tqdm=False)
    page = llm.engine.metrics().body.decode()
    assert re.search(r'^dovetail:telemetry_sink_on\{.*sink="Recorder".*\} 0', page, re.MULTILINE)


def test_two_sinks_of_one_name_are_told_apart(make_llm: MakeLLM) -> None:
    llm = make_llm(telemetry=["log", "log"])
    recorder = with_recorder(llm)
    llm.engine.metrics()
    assert [sink.name for sink in recorder.states[0].sinks] == ["log", "log#2", "Recorder"]


def test_the_engine_for_coroutines_has_metrics_and_traces(make_llm: MakeLLM) -> None:
    llm = make_llm()
    recorder = with_recorder(llm)

    async def main() -> None:
        with AsyncLLMEngine(llm.engine) as engine:
            async for _ in engine.generate([5, 6], LONG, "r", trace_headers={"traceparent": PARENT}):
                assert int((await engine.metrics()).body) > 0
        with pytest.raises(RequestError, match="the engine is shut down"):
            await engine.metrics()

    asyncio.run(main())
    assert recorder.requests["r"].trace_context == {"traceparent": PARENT}
