"""Conformance suite of telemetry sinks. A third party's test is a subclass::

    from dovetail.testing import TelemetrySinkSuite

    class TestMySink(TelemetrySinkSuite):
        plugin = MySink

        @pytest.fixture
        def options(self, tmp_path):  # where the sink needs any
            return {"path": tmp_path / "numbers"}

The measurements are made up, odd ones among them; no engine runs. Tests of expositions are skipped for sinks that are
no `Exposes`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dovetail.contracts.plugin import Environment
from dovetail.contracts.step import StepTimes
from dovetail.contracts.telemetry import (
    ArmDescription,
    Assignment,
    DrafterTotals,
    EngineDescription,
    EngineState,
    ExperimentDescription,
    Exposes,
    Exposition,
    FirstToken,
    GrammarStats,
    RequestStats,
    SinkTotals,
    StepStats,
    TelemetrySink,
)
from dovetail.testing.suite import PluginSuite

ENGINE = EngineDescription(
    model="hf:acme/model",
    max_model_len=4096,
    block_size=16,
    num_blocks=100,
    num_host_blocks=0,
    prefix_caching=True,
    kv_dtype="float32",
    drafter="lookup",
    experiments=(
        ExperimentDescription(
            name="drafts",
            arms=(
                ArmDescription(name="plain", share=0.25, drafter=None),
                ArmDescription(name="lookup", share=0.75, drafter="lookup"),
            ),
            unit="user",
            slice_s=60.0,
            traffic=0.5,
            seed=0,
        ),
    ),
)
STATE = EngineState(
    num_running=3,
    num_waiting=2,
    kv_blocks_used=40,
    kv_blocks_total=100,
    prefix_query_tokens=80,
    prefix_hit_tokens=20,
    weight_version=1,
    is_asleep=False,
    drafters={
        "lookup": DrafterTotals(
            num_draft_rounds=4, num_drafted=12, num_accepted=7, accepted_per_position=(4, 2, 1), num_errors=0
        )
    },
    sinks=(SinkTotals(name="this", seconds=0.01, is_on=True),),
)
ENVIRONMENT = Environment(device_type="cpu", num_cpus=2, memory_bytes=1 << 33)
TEXT_FORMATS = ("text/plain", "application/openmetrics-text")


def assignment(number: int, **changes: Any) -> Assignment:
    """What a request of the engine's experiment got; keywords replace fields."""
    values: dict[str, Any] = {
        "experiment": "drafts",
        "arm": ("plain", "lookup")[number % 2],
        "unit_hash": f"{number:016x}",
        "slice": None,
        "num_running": 3,
        "num_others": 1,
    }
    return Assignment(**values | changes)


def step_stats(number: int, **changes: Any) -> StepStats:
    """One step of a steady engine; keywords replace fields."""
    values: dict[str, Any] = {
        "step_id": number,
        "time": 100.0 + number / 50,
        "duration": 0.015,
        "num_running": 3,
        "num_waiting": 0,
        "num_prompt_tokens": 0,
        "num_generated_tokens": 3,
        "num_preempted": 0,
        "num_drafted": 0,
        "num_accepted": 0,
        "kv_blocks_used": 7,
        "kv_blocks_total": 100,
        "prefix_query_tokens": 80,
        "prefix_hit_tokens": 20,
        "times": StepTimes(prepare=0.1, forward=12.0, sample=0.5),
        "num_decoded": 3,
    }
    return StepStats(**values | changes)


def request_stats(number: int, **changes: Any) -> RequestStats:
    """One request of a steady engine; keywords replace fields."""
    values: dict[str, Any] = {
        "request_id": f"request-{number}",
        "arrival_time": 90.0,
        "first_scheduled_time": 90.5,
        "first_token_time": 91.0,
        "finish_time": 99.0 + number / 100,
        "finish_reason": "stop",
        "num_prompt_tokens": 40,
        "num_cached_tokens": 16,
        "num_generated_tokens": 20,
        "num_preemptions": 0,
        "drafter": "lookup",
        "n": 1,
        "max_tokens": 64,
    }
    return RequestStats(**values | changes)


ODD_STEPS: Mapping[str, Mapping[str, Any]] = {
    "nothing was computed": {"num_generated_tokens": 0, "num_decoded": 0, "num_running": 0, "kv_blocks_used": 0},
    "no KV blocks": {"kv_blocks_used": 0, "kv_blocks_total": 0},
    "no time has passed": {"duration": 0.0},
    "a first token at once": {"first_tokens": (FirstToken(latency=0.0), FirstToken(latency=9e9, drafter="lookup"))},
    "very many tokens": {"num_prompt_tokens": 1 << 40, "num_generated_tokens": 1 << 40, "num_decoded": 1 << 30},
}
ODD_REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "never scheduled": {
        "first_scheduled_time": None,
        "first_token_time": None,
        "finish_reason": "abort",
        "num_generated_tokens": 0,
    },
    "aborted before its first token": {
        "first_token_time": None,
        "finish_reason": "abort",
        "num_generated_tokens": 0,
    },
    "one token": {"num_generated_tokens": 1, "finish_time": 91.0},
    "failed": {"finish_reason": "error", "error_type": "_OTHER"},
    "failed of its drafter": {"drafter_error": "RuntimeError: no luck"},
    "a drafter that rests": {"drafter_is_idle": True, "speculation": "lookup"},
    "a grammar": {"grammar": GrammarStats(form="json_schema", was_compiled=False, wait=0.25)},
    "a grammar that is refused": {
        "grammar": GrammarStats(form="regex", was_compiled=False, wait=0.25, is_refused=True),
        "first_scheduled_time": None,
        "first_token_time": None,
        "finish_reason": "error",
        "error_type": "_OTHER",
        "num_generated_tokens": 0,
    },
    "a grammar that was not compiled in time": {
        "grammar": GrammarStats(form="regex", was_compiled=False, wait=None),
        "first_scheduled_time": None,
        "first_token_time": None,
        "finish_reason": "abort",
        "num_generated_tokens": 0,
    },
    "no drafter": {"drafter": None},
    "several completions, one of them empty": {"n": 8, "num_generated_tokens": 7},
    "no limit": {"max_tokens": None},
    "an id in any letters": {"request_id": 'a"b\\c\n\u00e9\U0001f54a'},
    "an arm of an experiment": {"assignment": assignment(1)},
    "an arm, by slices of time": {"assignment": assignment(1, slice=29_000_000)},
    "a trace": {"trace_context": {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}},
    "a malformed trace": {"trace_context": {"traceparent": "00-zz", "tracestate": "=,="}},
    "no time has passed": {
        "arrival_time": 5.0,
        "first_scheduled_time": 5.0,
        "first_token_time": 5.0,
        "finish_time": 5.0,
    },
    "drafts": {
        "num_draft_rounds": 4,
        "num_drafted": 12,
        "num_accepted": 7,
        "drafted_per_position": (4, 4, 4),
        "accepted_per_position": (4, 2, 1),
    },
}


class TelemetrySinkSuite(PluginSuite):
    """Tests of every telemetry sink."""

    kind: ClassVar[str] = "telemetry_sink"
    plugin: ClassVar[type[TelemetrySink]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """As in other suites, `options` may be a mapping: the fixture then gives it."""
        given = vars(cls).get("options")
        if isinstance(given, Mapping):

            def options(self: TelemetrySinkSuite) -> Mapping[str, Any]:
                return given

            cls.options = pytest.fixture(options)  # type: ignore[method-assign]
        super().__init_subclass__(**kwargs)

    @pytest.fixture
    def options(self) -> Mapping[str, Any]:
        """Options of the sink in the config. Override it, or set `options` to a mapping."""
        return {}

    @pytest.fixture
    def sink(self, options: Mapping[str, Any]) -> Iterator[TelemetrySink]:
        """A sink of an engine that has started."""
        validated = self.plugin.Options.model_validate(dict(options))
        assert self.plugin.check(None, validated, ENVIRONMENT) == []
        sink = self.plugin(validated)
        sink.on_start(ENGINE)
        yield sink
        sink.close()

    @pytest.fixture
    def exposing(self, sink: TelemetrySink) -> Exposes:
        """The same, of a sink that can be scraped."""
        if not isinstance(sink, Exposes):
            pytest.skip(f"{self.plugin.__name__} exposes nothing")
        return sink

    @pytest.mark.parametrize("step", ODD_STEPS)
    def test_takes_every_step(self, sink: TelemetrySink, step: str) -> None:
        """Steps without tokens, blocks or time, and long ones."""
        for number in (1, 2):
            sink.on_step(step_stats(number, **ODD_STEPS[step]))
        sink.on_step(step_stats(3))

    @pytest.mark.parametrize("request_", ODD_REQUESTS)
    def test_takes_every_request(self, sink: TelemetrySink, request_: str) -> None:
        """Requests that ended early, failed, or gave no parameter."""
        for number in (1, 2):
            sink.on_request(request_stats(number, **ODD_REQUESTS[request_]))
        sink.on_step(step_stats(1))

    def test_goes_on_with_another_kv_memory(self, sink: TelemetrySink) -> None:
        """`on_start` comes again where the KV memory is replaced."""
        sink.on_step(step_stats(1))
        sink.on_start(ENGINE)
        sink.on_step(step_stats(2))

    def test_closes_twice(self, sink: TelemetrySink) -> None:
        """A sink that raised is closed before its engine is."""
        sink.on_step(step_stats(1))
        sink.close()
        sink.close()

    def test_closes_before_it_began(self, options: Mapping[str, Any]) -> None:
        """An engine may fail to start."""
        self.plugin(self.plugin.Options.model_validate(dict(options))).close()

    def test_exposes_before_the_first_step(self, exposing: Exposes) -> None:
        """An idle engine is scraped as well."""
        assert read(exposing.exposition(STATE))

    def test_exposes_text_that_prometheus_reads(self, exposing: Exposes) -> None:
        """With a content type of its format; each series is there once, and no value is missing."""
        feed(exposing, 20)
        exposition = exposing.exposition(STATE)
        assert exposition.content_type.startswith(TEXT_FORMATS)
        assert isinstance(exposition.body, bytes)
        assert all(value == value for value in read(exposition).values()), "a value is no number"

    def test_reading_changes_nothing(self, exposing: Exposes) -> None:
        """Several servers read the same counts, in any order."""
        feed(exposing, 20)
        assert exposing.exposition(STATE) == exposing.exposition(STATE)

    def test_shows_the_state_that_it_is_given(self, exposing: Exposes) -> None:
        """The state holds for now: one of an earlier step must not stand in for it."""
        feed(exposing, 20)
        other = replace(STATE, num_running=0, num_waiting=0, kv_blocks_used=0)
        assert exposing.exposition(STATE) != exposing.exposition(other)
        assert exposing.exposition(other) == exposing.exposition(other)

    def test_counts_only_grow(self, exposing: Exposes) -> None:
        """Counters and histograms never fall while the same kinds of requests run."""
        before: dict[str, float] = {}
        for start in range(0, 50, 10):
            feed(exposing, 10, first=start)
            now = read(exposing.exposition(STATE), ("counter", "histogram"))
            assert [series for series, value in before.items() if now.get(series, -1.0) < value] == []
            before = now
        assert before, "the sink exposes no counter and no histogram"
        feed(exposing, 10)
        assert read(exposing.exposition(STATE), ("counter", "histogram")) != before

    def test_histograms_agree_with_themselves(self, exposing: Exposes) -> None:
        """Buckets are cumulative, and the last one holds all observations."""
        feed(exposing, 20)
        for family in families(exposing.exposition(STATE)):
            if family.type == "histogram":
                check_histogram(family)

    def test_its_size_does_not_grow_with_requests(self, exposing: Exposes) -> None:
        """No label tells one request from another, nor one text of an error, nor every version of the weights, nor the
        units of an experiment."""
        feed(exposing, 50, varied=True)
        before = len(exposing.exposition(STATE).body)
        feed(exposing, 1000, first=50, varied=True)
        assert len(exposing.exposition(STATE).body) < 1.2 * before

    def test_is_read_while_it_counts(self, exposing: Exposes) -> None:
        """Threads read while the engine's thread counts; each reads histograms that agree with themselves."""
        readers = [Reader(exposing) for _ in range(2)]
        first, interval = 0, sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for reader in readers:
                reader.start()
            deadline = time.monotonic() + 60
            while any(reader.num_changes < 10 and reader.is_alive() for reader in readers) or first < 1000:
                assert time.monotonic() < deadline, "readers do not get done while the engine's thread counts"
                feed(exposing, 10, first=first, varied=True)
                feed(exposing, 10, first=first)
                first += 10
        finally:
            sys.setswitchinterval(interval)
            for reader in readers:
                reader.stop()
        assert [reader.failure for reader in readers] == [None, None]


class Reader(threading.Thread):
    """Reads an exposition again and again, and checks it."""

    def __init__(self, sink: Exposes):
        super().__init__(daemon=True)
        self.failure: BaseException | None = None
        self.num_changes = 0
        """Expositions that differed from the one that was read before."""
        self._sink = sink
        self._is_stopped = threading.Event()

    def run(self) -> None:
        """Ends at the first failure."""
        try:
            last = None
            while not self._is_stopped.is_set():
                found = self._sink.exposition(STATE)
                for family in families(found):
                    if family.type == "histogram":
                        check_histogram(family)
                self.num_changes += found.body != last
                last = found.body
        except BaseException as failure:
            self.failure = failure

    def stop(self) -> None:
        """Waits for the end, of a reader that hangs for some seconds."""
        self._is_stopped.set()
        self.join(10)


def feed(sink: TelemetrySink, count: int, *, first: int = 0, varied: bool = False) -> None:
    """Steps and requests; with `varied`, each request has another error, another version, another unit of the
    experiment and, now and then, another drafter or arm."""
    for number in range(first, first + count):
        changes: dict[str, Any] = {}
        if varied:
            changes = {
                "weight_version": number,
                "finish_reason": "error",
                "error_type": f"Error{number}",
                "drafter": "lookup" if number % 2 else None,
                "assignment": assignment(number) if number % 3 else None,
            }
        sink.on_request(request_stats(number, **changes))
        sink.on_step(step_stats(number, first_tokens=(FirstToken(latency=0.5, drafter="lookup"),)))


def families(exposition: Exposition) -> list[Any]:
    """The metric families of an exposition, by prometheus_client's parser."""
    return list(text_string_to_metric_families(exposition.body.decode()))


def read(exposition: Exposition, types: tuple[str, ...] = ()) -> dict[str, float]:
    """Values by series; of metrics of these types, or of all but sums, which may fall by rounding."""
    found: dict[str, float] = {}
    for family in families(exposition):
        for sample in family.samples:
            if types and (family.type not in types or sample.name.endswith("_sum")):
                continue
            series = f"{sample.name}{sorted(sample.labels.items())}"
            assert series not in found, f"{series} is there twice"
            found[series] = sample.value
    return found


def check_histogram(family: Any) -> None:
    """Asserts that the buckets of each series grow up to its count."""
    buckets: dict[str, list[tuple[float, float]]] = {}
    counts: dict[str, float] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        series = str(sorted(labels.items()))
        if sample.name.endswith("_bucket"):
            buckets.setdefault(series, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_count"):
            counts[series] = sample.value
    assert buckets.keys() == counts.keys(), family.name
    for series, found in buckets.items():
        values = [value for _, value in sorted(found)]
        assert values == sorted(values), f"{family.name}{series}: {found}"
        assert max(found) == (float("inf"), counts[series]), f"{family.name}{series}: {found}"
