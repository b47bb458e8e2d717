"""The `experiments` sink: what `dovetail ab live` reads, and that no disk harms an engine."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import Environment
from dovetail.contracts.telemetry import RequestStats
from dovetail.plugins.telemetry.experiments.sink import ExperimentsOptions, ExperimentsSink
from dovetail.testing.telemetry_suite import ENGINE, TelemetrySinkSuite, assignment

MakeRequest = Callable[..., RequestStats]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def started(file: Path, **options: Any) -> ExperimentsSink:
    sink = ExperimentsSink(ExperimentsOptions(path=file, **options))
    sink.on_start(ENGINE)
    return sink


def test_a_request_is_a_line_under_the_design_of_its_experiment(
    make_request_stats: MakeRequest, tmp_path: Path
) -> None:
    sink = started(tmp_path / "arms.jsonl")
    sink.on_start(ENGINE)  # the KV memory was replaced
    sink.on_request(make_request_stats())  # takes part in nothing
    sink.on_request(make_request_stats(assignment=assignment(1, slice=7), drafter="lookup", num_draft_rounds=2))
    sink.close()
    design, record = read(tmp_path / "arms.jsonl")
    assert (design["event"], design["name"], design["unit"]) == ("experiment", "drafts", "user")
    assert design["arms"][0] == {"name": "plain", "share": 0.25, "drafter": None}
    assert record["design"] == design["design"]
    assert (record["experiment"], record["arm"], record["unit"]) == ("drafts", "lookup", f"{1:016x}")
    assert (record["queue"], record["ttft"], record["decode"], record["e2e"]) == (0.5, 1.0, 7.0, 8.0)
    assert (record["prompt_tokens"], record["cached_tokens"], record["output_tokens"]) == (12, 8, 5)
    assert (record["slice"], record["num_running"], record["num_others"], record["rounds"]) == (7, 3, 1, 2)
    assert (record["finish_reason"], record["preemptions"], record["drafter"]) == ("stop", 1, "lookup")
    assert 0 <= record["time"] - design["time"] + 8.0 < 60, "it arrived eight seconds before it ended"


def test_another_design_of_a_name_is_told_apart(make_request_stats: MakeRequest, tmp_path: Path) -> None:
    file = tmp_path / "arms.jsonl"
    for traffic in (0.5, 1.0, 0.5):
        experiment = replace(ENGINE.experiments[0], traffic=traffic)
        sink = ExperimentsSink(ExperimentsOptions(path=file))
        sink.on_start(replace(ENGINE, experiments=(experiment,)))
        sink.on_request(make_request_stats(assignment=assignment(1)))
        sink.close()
    first, second, third = [line["design"] for line in read(file) if line["event"] == "request"]
    assert first == third != second


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Files may not grow beyond so many bytes meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_costs_lines_which_are_counted(
    make_request_stats: MakeRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "arms.jsonl"
    sink = started(file)
    while not file.stat().st_size:  # the design is written
        os.sched_yield()
    with full_disk(file.stat().st_size + 600):
        with sink._lines._changed:  # its thread takes all ten at once
            for number in range(10):
                sink.on_request(make_request_stats(assignment=assignment(number)))
        while not sink.num_lost:
            os.sched_yield()
    lost = sink.num_lost
    sink.on_request(make_request_stats(assignment=assignment(10)))
    sink.close()
    whole, broken = [], []
    for line in file.read_text().splitlines():
        try:
            whole.append(json.loads(line))
        except json.JSONDecodeError:
            broken.append(line)
    assert [line["lines"] for line in whole if line["event"] == "lost"] == [lost]
    units = [int(line["unit"], 16) for line in whole if line["event"] == "request"]
    assert units == [*range(10 - lost), 10]
    assert 0 < lost <= 10
    assert len(broken) <= 1
    assert caplog.text.count("cannot write to") == 1
    assert f"lost {lost} lines" in caplog.text


def test_a_full_queue_loses_lines_and_does_not_wait(make_request_stats: MakeRequest, tmp_path: Path) -> None:
    sink = started(tmp_path / "arms.jsonl", queue_size=1)
    for number in range(1000):
        sink.on_request(make_request_stats(assignment=assignment(number)))
    sink.close()
    written = [line for line in read(tmp_path / "arms.jsonl") if line["event"] == "request"]
    assert len(written) + sink.num_lost in (1000, 1001), "the line of the design may have filled the queue"
    assert sink.num_lost > 0


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    here = Environment(device_type="cpu", num_cpus=1, memory_bytes=1)
    options = ExperimentsOptions(path=tmp_path / "none" / "arms.jsonl")
    assert ExperimentsSink.check(None, options, here) == [
        f"there is no folder {tmp_path / 'none'}: create it, or give another path"
    ]
    with pytest.raises(ConfigError, match=r"cannot write to .*: give another path"):
        ExperimentsSink(ExperimentsOptions(path=tmp_path))


class TestConforms(TelemetrySinkSuite):
    plugin = ExperimentsSink

    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": tmp_path / "arms.jsonl"}
