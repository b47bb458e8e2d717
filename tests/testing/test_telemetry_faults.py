"""What the suite of telemetry sinks finds: each a change in a sink that passes."""

from __future__ import annotations

import time
from collections import Counter

import pytest

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
from dovetail.testing.faults import Fault, check_fault, run_test
from dovetail.testing.telemetry_suite import TelemetrySinkSuite

BOUNDS = (0.1, 1.0, 10.0)


class Small(Exposes):
    """A counter, a histogram of latencies and a gauge."""

    contract = (1, 0)

    def __init__(self, options: PluginOptions):
        super().__init__(options)
        self.tokens = 0
        self.observed = [0] * (len(BOUNDS) + 1)
        self.is_closed = False

    def on_step(self, stats: StepStats) -> None:
        self.tokens += stats.num_generated_tokens

    def on_request(self, stats: RequestStats) -> None:
        latency = stats.finish_time - stats.arrival_time
        self.observed[sum(latency > bound for bound in BOUNDS)] += 1

    def buckets(self) -> list[str]:
        observed = self.observed[:]
        counts = [sum(observed[: index + 1]) for index in range(len(observed))]
        lines = [f'latency_bucket{{le="{le}"}} {n}' for le, n in zip((*BOUNDS, "+Inf"), counts, strict=True)]
        return [*lines, f"latency_count {counts[-1]}"]

    def lines(self, state: EngineState) -> list[str]:
        return [
            "# TYPE tokens_total counter",
            f"tokens_total {self.tokens}",
            "# TYPE running gauge",
            f"running {state.num_running}",
            "# TYPE latency histogram",
            *self.buckets(),
        ]

    def exposition(self, state: EngineState) -> Exposition:
        return Exposition(content_type="text/plain; version=0.0.4", body="\n".join([*self.lines(state), ""]).encode())


class DividesByTheBlocks(Small):
    def on_step(self, stats: StepStats) -> None:
        super().on_step(stats)
        self.usage = stats.kv_blocks_used / stats.kv_blocks_total


class DividesByTheTime(Small):
    def on_step(self, stats: StepStats) -> None:
        super().on_step(stats)
        self.rate = stats.num_generated_tokens / stats.duration


class TakesAllForScheduled(Small):
    def on_request(self, stats: RequestStats) -> None:
        super().on_request(stats)
        self.queued = stats.first_scheduled_time - stats.arrival_time  # type: ignore[operator]


class DividesByTheTokens(Small):
    def on_request(self, stats: RequestStats) -> None:
        super().on_request(stats)
        self.per_token = 1 / (stats.num_generated_tokens - 1)


class ParsesTheTrace(Small):
    def on_request(self, stats: RequestStats) -> None:
        super().on_request(stats)
        parent = stats.trace_context.get("traceparent")
        if parent is not None:
            _, self.trace_id, _, _ = parent.split("-")


class StartsOnce(Small):
    has_started = False

    def on_start(self, engine: EngineDescription) -> None:
        assert not self.has_started
        self.has_started = True


class ClosesOnce(Small):
    def close(self) -> None:
        if self.is_closed:
            raise ValueError("closed already")
        self.is_closed = True


class ClosesWhatItOpenedAtTheStart(Small):
    def on_start(self, engine: EngineDescription) -> None:
        self.name = engine.model

    def close(self) -> None:
        self.name = self.name.upper()


class NeedsAStep(Small):
    def on_step(self, stats: StepStats) -> None:
        super().on_step(stats)
        self.last = stats

    def lines(self, state: EngineState) -> list[str]:
        return [*super().lines(state), f"last {self.last.step_id}"]


class WritesJSON(Small):
    def exposition(self, state: EngineState) -> Exposition:
        return Exposition(content_type="application/json", body=b"{}")


class RepeatsASeries(Small):
    def lines(self, state: EngineState) -> list[str]:
        return [*super().lines(state), f"running {state.num_running}"]


class WritesNaN(Small):
    def lines(self, state: EngineState) -> list[str]:
        return [*super().lines(state), "rate NaN"]


class StartsAnewWhenItIsRead(Small):
    def exposition(self, state: EngineState) -> Exposition:
        exposition = super().exposition(state)
        self.tokens = 0
        return exposition


class CountsItsReaders(Small):
    readers = 0

    def lines(self, state: EngineState) -> list[str]:
        self.readers += 1
        return [*super().lines(state), f"readers {self.readers}"]


class ShowsTheLastStep(Small):
    num_running = 0

    def on_step(self, stats: StepStats) -> None:
        super().on_step(stats)
        self.num_running = stats.num_running

    def lines(self, state: EngineState) -> list[str]:
        return [
            line if not line.startswith("running") else f"running {self.num_running}" for line in super().lines(state)
        ]


class KeepsTheLastTokens(Small):
    def on_step(self, stats: StepStats) -> None:
        self.tokens = stats.step_id % 7


class CountsNothing(Small):
    def on_step(self, stats: StepStats) -> None: ...
    def on_request(self, stats: RequestStats) -> None: ...


class DoesNotAddUpBuckets(Small):
    def buckets(self) -> list[str]:
        lines = [f'latency_bucket{{le="{le}"}} {n}' for le, n in zip((*BOUNDS, "+Inf"), self.observed, strict=True)]
        return [*lines, f"latency_count {sum(self.observed)}"]


class ForgetsInfinity(Small):
    def buckets(self) -> list[str]:
        return [line for line in super().buckets() if "Inf" not in line]


class Labelled(Small):
    """Counts requests by a label."""

    def __init__(self, options: PluginOptions):
        super().__init__(options)
        self.by_label: Counter[object] = Counter()

    def label(self, stats: RequestStats) -> object:
        raise NotImplementedError

    def on_request(self, stats: RequestStats) -> None:
        super().on_request(stats)
        self.by_label[self.label(stats)] += 1

    def lines(self, state: EngineState) -> list[str]:
        labelled = [f'ended_total{{by="{label}"}} {count}' for label, count in list(self.by_label.items())]
        return [*super().lines(state), "# TYPE ended_total counter", *labelled]


class LabelsById(Labelled):
    def label(self, stats: RequestStats) -> object:
        return stats.request_id


class LabelsByVersion(Labelled):
    def label(self, stats: RequestStats) -> object:
        return stats.weight_version


class LabelsByError(Labelled):
    def label(self, stats: RequestStats) -> object:
        return stats.error_type


class AddsUpWaits(Small):
    """Takes every grammar for compiled."""

    waited = 0.0

    def on_request(self, stats: RequestStats) -> None:
        super().on_request(stats)
        if stats.grammar is not None:
            self.waited += stats.grammar.wait  # type: ignore[operator]


class LabelsByUnit(Labelled):
    def label(self, stats: RequestStats) -> object:
        return stats.assignment and stats.assignment.unit_hash


class TakesAllForSliced(Small):
    def on_request(self, stats: RequestStats) -> None:
        super().on_request(stats)
        if stats.assignment is not None:
            self.slice = stats.assignment.slice + 1  # type: ignore[operator]


class ReadsWhatGrows(Labelled):
    """Goes through what the engine's thread changes."""

    def label(self, stats: RequestStats) -> object:
        return stats.request_id

    def lines(self, state: EngineState) -> list[str]:
        total = 0
        for label in self.by_label:
            total += len(str(label))
            time.sleep(0)  # the other thread's turn
        return [*Small.lines(self, state), "# TYPE letters gauge", f"letters {total}"]


FAULTS = [
    Fault("divides by the blocks of an engine that has none", DividesByTheBlocks, "test_takes_every_step"),
    Fault("divides by the time of a step that took none", DividesByTheTime, "test_takes_every_step"),
    Fault("takes every request for scheduled", TakesAllForScheduled, "test_takes_every_request"),
    Fault("divides by the time between the tokens of one", DividesByTheTokens, "test_takes_every_request"),
    Fault("raises at a malformed trace", ParsesTheTrace, "test_takes_every_request[a malformed trace]"),
    Fault("takes every grammar for compiled", AddsUpWaits, "test_takes_every_request"),
    Fault("starts once only", StartsOnce, "test_goes_on_with_another_kv_memory"),
    Fault("closes once only", ClosesOnce, "test_closes_twice"),
    Fault("closes what it opens at the start", ClosesWhatItOpenedAtTheStart, "test_closes_before_it_began"),
    Fault("exposes nothing before a step", NeedsAStep, "test_exposes_before_the_first_step"),
    Fault("writes JSON", WritesJSON, "test_exposes_text_that_prometheus_reads"),
    Fault("writes a series twice", RepeatsASeries, "test_exposes_text_that_prometheus_reads"),
    Fault("writes a value that is none", WritesNaN, "test_exposes_text_that_prometheus_reads"),
    Fault("starts anew when it is read", StartsAnewWhenItIsRead, "test_reading_changes_nothing"),
    Fault("counts its readers", CountsItsReaders, "test_reading_changes_nothing"),
    Fault("shows the state of the last step", ShowsTheLastStep, "test_shows_the_state_that_it_is_given"),
    Fault("shows the last value as a counter", KeepsTheLastTokens, "test_counts_only_grow"),
    Fault("counts nothing", CountsNothing, "test_counts_only_grow"),
    Fault("does not add up its buckets", DoesNotAddUpBuckets, "test_histograms_agree_with_themselves"),
    Fault("leaves out the last bucket", ForgetsInfinity, "test_histograms_agree_with_themselves"),
    Fault("labels by request", LabelsById, "test_its_size_does_not_grow_with_requests"),
    Fault("labels by every version of the weights", LabelsByVersion, "test_its_size_does_not_grow_with_requests"),
    Fault("labels by every error", LabelsByError, "test_its_size_does_not_grow_with_requests"),
    Fault("labels by unit of an experiment", LabelsByUnit, "test_its_size_does_not_grow_with_requests"),
    Fault("takes every unit for a slice", TakesAllForSliced, "test_takes_every_request[an arm of an experiment]"),
    Fault("reads what grows meanwhile", ReadsWhatGrows, "test_is_read_while_it_counts"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_sink_that(fault: Fault) -> None:
    check_fault(fault, TelemetrySinkSuite, plugin=fault.plugin)


@pytest.mark.parametrize("test", sorted({fault.test.partition("[")[0] for fault in FAULTS}))
def test_the_sink_without_a_fault_passes(test: str) -> None:
    outcome = run_test(TelemetrySinkSuite, test, plugin=Small)
    assert outcome.passed
    assert not outcome.failed


class Silent(TelemetrySink):
    """Hears all and says nothing."""

    contract = (1, 0)


def test_a_sink_that_exposes_nothing_is_not_asked_for_it() -> None:
    outcome = run_test(TelemetrySinkSuite, "test_exposes_before_the_first_step", plugin=Silent)
    assert (outcome.passed, outcome.failed, len(outcome.skipped)) == ([], {}, 1)
