"""Verdicts, refusals and exit codes of `bench compare`, on made-up results."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dovetail.contracts.errors import ConfigError
from dovetail.plugins.commands.bench.cli import app
from dovetail.plugins.commands.bench.compare import compare
from dovetail.plugins.commands.bench.result import FailedRequests, Metric, Result, read_result, write_json


def result(scale: float = 1.0, *, seed: int = 0, groups: int = 30, **changes: Any) -> Result:
    """Latencies around `scale` seconds, and the rates that go with them."""
    draw = random.Random(seed)
    seconds = [[scale * draw.uniform(0.9, 1.1)] for _ in range(groups)]
    rates = [[1 / value] for (value,) in seconds]
    values: dict[str, Any] = {
        "kind": "throughput",
        "date": "2026-01-01T00:00:00+00:00",
        "workloads": {"w": {"requests": 4, "output_tokens": 8}},
        "procedure": {},
        "metrics": {
            "w/ttft": Metric("s", "lower", "median", "d", seconds),
            "w/output": Metric("tok/s", "higher", "mean", "d", rates),
        },
        "environment": {"cpu": "x", "load_average": seed},
        "config": {},
    }
    return Result(**values | changes)


@pytest.mark.parametrize(("scale", "verdict"), [(1.3, "slower"), (0.8, "faster")])
def test_a_clear_difference_is_decided_in_both_directions_of_metrics(scale: float, verdict: str) -> None:
    rows = compare(result(), result(scale, seed=1)).rows
    assert [row.verdict for row in rows] == [verdict, verdict]
    assert rows[0].ratio == pytest.approx(scale, rel=0.1)
    assert rows[1].ratio == pytest.approx(1 / scale, rel=0.1)


def test_equal_results_are_undecided() -> None:
    rows = compare(result(), result()).rows
    assert {row.verdict for row in rows} == {"undecided"}
    assert {row.ratio for row in rows} == {1.0}


def test_one_run_beside_itself_is_told() -> None:
    same, other = (compare(result(), result(seed=seed)).warnings for seed in (0, 1))
    assert list(same) == ["a and b are the same run: nothing is compared"]
    assert list(other) == []


def test_requests_that_failed_are_told() -> None:
    failed = result(
        seed=1, failures={"w": [FailedRequests("http 429", 3, "too many"), FailedRequests("timeout", 1, "")]}
    )
    assert list(compare(result(), failed).warnings) == [
        "b: w: 4 requests failed; latencies are of the others",
        "b: w: 3 x http 429: too many",
        "b: w: 1 x timeout: ",
    ]


def test_few_repetitions_are_undecided_however_far_apart() -> None:
    rows = compare(result(groups=2), result(9.0, groups=2)).rows
    assert {(row.verdict, row.interval) for row in rows} == {("undecided", None)}


def test_other_workloads_are_refused_with_what_differs() -> None:
    other = result(workloads={"w": {"requests": 4, "output_tokens": 9}})
    with pytest.raises(ConfigError, match=r"w\.output_tokens: 8 / 9"):
        compare(result(), other)
    assert "w.output_tokens: 8 / 9" in compare(result(), other, allow=True).warnings[0]


def test_results_of_other_subcommands_have_nothing_in_common() -> None:
    other = result(kind="startup", metrics={"startup/total": Metric("s", "lower", "median", "d", [[1.0]])})
    with pytest.raises(ConfigError, match="throughput / startup"):
        compare(result(), other)
    with pytest.raises(ConfigError, match="no metric in common"):
        compare(result(), other, allow=True)


def test_another_machine_is_noted() -> None:
    notes = compare(result(), result(environment={"cpu": "y"})).notes
    assert "differs: cpu: x / y" in notes


def test_other_plugins_are_noted_by_kind_and_name() -> None:
    def config(attention: str, version: str) -> dict[str, Any]:
        names = {"executor": "cpu", "attention_backend": attention, "scheduler": "fcfs"}
        plugins = [{"kind": k, "name": n, "distribution": "dovetail", "version": "1"} for k, n in names.items()]
        return {"values": {}, "plugins": [*plugins, {"kind": "telemetry_sink", "name": "log", "version": version}]}

    notes = compare(result(config=config("paged_cpu", "1")), result(config=config("sdpa", "2"))).notes
    assert [note for note in notes if note.startswith("differs: plugins")] == [
        "differs: plugins.attention_backend: paged_cpu (dovetail 1) / sdpa (dovetail 1)",
        "differs: plugins.telemetry_sink: log (1) / log (2)",
    ]


def test_an_unknown_metric_answers_with_the_nearest() -> None:
    assert len(compare(result(), result(), metrics=["ttft"]).rows) == 1
    with pytest.raises(ConfigError, match="did you mean"):
        compare(result(), result(), metrics=["tftt"])


def run(tmp_path: Path, a: Result, b: Result, *options: str) -> Any:
    for name, one in (("a", a), ("b", b)):
        (tmp_path / f"{name}.json").write_text(write_json(one))
    arguments = ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *options]
    return CliRunner().invoke(app, arguments)


def test_the_exit_code_says_slower(tmp_path: Path) -> None:
    assert run(tmp_path, result(), result(1.3, seed=1), "--fail-if-slower", "0.05").exit_code == 1
    assert run(tmp_path, result(), result(1.3, seed=1), "--fail-if-slower", "0.9").exit_code == 0
    assert run(tmp_path, result(), result(0.8, seed=1), "--fail-if-slower", "0.05").exit_code == 0
    assert run(tmp_path, result(), result(1.3, seed=1)).exit_code == 0


def test_a_gate_that_can_decide_nothing_is_refused(tmp_path: Path) -> None:
    found = run(tmp_path, result(groups=1), result(2.0, groups=1), "--fail-if-slower", "0.05")
    assert isinstance(found.exception, ConfigError)


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    assert run(tmp_path, result(), result(1.3, seed=1), "--html", str(tmp_path / "c.html")).exit_code == 0
    page = (tmp_path / "c.html").read_text()
    assert "<svg" in page
    assert "<script" not in page
    assert "http" not in page


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no result"),
        ("{]", "no result"),
        ("[1]", "no result"),
        ('{"dovetail_bench": 2}', "format 1"),
        (write_json(result()).replace('"tok/s"', "7"), "metrics.w/output.unit"),
        (result(metrics={"w/x": Metric("s", "lower", "median", "d", [[]])}).model_dump_json(), "no samples"),
    ],
)
def test_corrupt_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "r.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_result(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_result(tmp_path / "none.json")


def test_results_beside_other_neighbours_are_not_compared_unasked() -> None:
    alone, beside = result(), result(procedure={"neighbours": 2, "neighbour_threads": 1})
    with pytest.raises(ConfigError, match="neighbours: 0 / 2"):
        compare(alone, beside)
    assert any("neighbours: 0 / 2" in line for line in compare(alone, beside, allow=True).warnings)
    assert compare(beside, result(seed=1, procedure=beside.procedure)).warnings == []
