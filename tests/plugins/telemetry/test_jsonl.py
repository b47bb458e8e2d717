"""The `jsonl` sink: a line per step and per request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import Environment
from dovetail.contracts.telemetry import RequestStats, StepStats
from dovetail.plugins.telemetry.jsonl import JSONLOptions, JSONLSink
from dovetail.testing.telemetry_suite import TelemetrySinkSuite

MakeStats = Callable[..., StepStats]
HERE = Environment(device_type="cpu", num_cpus=1, memory_bytes=1)


def test_lines_hold_every_field(step_stats: MakeStats, request_stats: RequestStats, tmp_path: Path) -> None:
    file = tmp_path / "stats.jsonl"
    sink = JSONLSink(JSONLOptions(path=file))
    sink.on_step(step_stats())
    sink.on_request(request_stats)
    step, request = map(json.loads, file.read_text().splitlines())  # readable while the engine runs
    assert step.pop("event") == "step"
    assert step.pop("times") == {"prepare": 0.0, "forward": 2.5, "sample": 0.0, "draft": 0.0}
    assert step.keys() | {"times"} == StepStats.__dataclass_fields__.keys()
    assert (step["kv_blocks_used"], step["prefix_hit_tokens"]) == (7, 20)
    assert request.pop("event") == "request"
    assert request.keys() == RequestStats.__dataclass_fields__.keys()
    assert (request["request_id"], request["finish_reason"], request["num_cached_tokens"]) == ("r1", "stop", 8)
    sink.close()
    sink.close()


def test_steps_can_be_left_out_and_files_are_appended_to(
    step_stats: MakeStats, request_stats: RequestStats, tmp_path: Path
) -> None:
    file = tmp_path / "stats.jsonl"
    for _ in range(2):
        sink = JSONLSink(JSONLOptions(path=file, steps=False))
        sink.on_step(step_stats())
        sink.on_request(request_stats)
        sink.close()
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["request", "request"]


def test_a_missing_folder_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    options = JSONLOptions(path=tmp_path / "none" / "stats.jsonl")
    assert JSONLSink.check(None, options, HERE) == [
        f"there is no folder {tmp_path / 'none'}: create it, or give another path"
    ]
    assert JSONLSink.check(None, JSONLOptions(path="stats.jsonl"), HERE) == []


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write to .*: give another path"):
        JSONLSink(JSONLOptions(path=tmp_path))


class TestConforms(TelemetrySinkSuite):
    plugin = JSONLSink

    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": tmp_path / "stats.jsonl"}
