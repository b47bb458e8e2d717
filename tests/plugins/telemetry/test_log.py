"""The `log` sink: one line per interval, with what happened since the last."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from dovetail.contracts.telemetry import RequestStats, StepStats
from dovetail.plugins.telemetry.log import LogOptions, LogSink
from dovetail.testing.telemetry_suite import TelemetrySinkSuite

MakeStats = Callable[..., StepStats]


def test_a_line_when_the_interval_is_over(
    step_stats: MakeStats, request_stats: RequestStats, caplog: pytest.LogCaptureFixture
) -> None:
    sink = LogSink(LogOptions(interval_s=10))
    with caplog.at_level(logging.INFO):
        for time in (100.0, 105.0, 109.4):
            sink.on_step(step_stats(time=time))
            sink.on_request(request_stats)
        assert caplog.messages == []
        sink.on_step(step_stats(time=109.5))
    # 4 steps in the 10 seconds since 99.5, when the first one began.
    assert caplog.messages == [
        "prompt 16.0 tok/s, generated 1.2 tok/s, running 3, waiting 2, preempted 4, KV blocks 7 of 20 used,"
        " prefix hits 25.0%"
    ]


def test_each_line_counts_anew(step_stats: MakeStats, caplog: pytest.LogCaptureFixture) -> None:
    sink = LogSink(LogOptions(interval_s=1))
    with caplog.at_level(logging.INFO):
        sink.on_step(step_stats(time=100.0, duration=2.0))
        sink.on_step(step_stats(time=104.0, num_prompt_tokens=0, prefix_query_tokens=0, num_preempted=0))
    assert caplog.messages[0].startswith("prompt 20.0 tok/s, generated 1.5 tok/s")
    assert caplog.messages[1].startswith("prompt 0.0 tok/s, generated 0.8 tok/s, running 3, waiting 2, preempted 0")
    assert caplog.messages[1].endswith("prefix hits 0.0%")


def test_the_interval_must_be_positive() -> None:
    with pytest.raises(ValidationError, match="interval_s"):
        LogOptions(interval_s=0)


def test_guesses_are_told_where_there_were_any(step_stats: MakeStats, caplog: pytest.LogCaptureFixture) -> None:
    sink = LogSink(LogOptions(interval_s=1))
    with caplog.at_level(logging.INFO):
        sink.on_step(step_stats(time=100.0, duration=2.0, num_drafted=8, num_accepted=5))
        sink.on_step(step_stats(time=104.0))
    assert caplog.messages[0].endswith("prefix hits 25.0%, drafts accepted 5 of 8")
    assert "drafts" not in caplog.messages[1]


class TestConforms(TelemetrySinkSuite):
    plugin = LogSink
