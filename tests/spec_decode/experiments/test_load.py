"""Open-loop load: the same prompts at the same times in every arm, times from arrival, and queues that grow."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail import LLMEngine, SamplingParams
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.bootstrap import Resampler
from dovetail.spec_decode.experiments.columns import plain
from dovetail.spec_decode.experiments.example import EXAMPLE
from dovetail.spec_decode.experiments.experiment import Procedure, run_experiment
from dovetail.spec_decode.experiments.export import write_tables
from dovetail.spec_decode.experiments.fail_if import Condition
from dovetail.spec_decode.experiments.load.plan import prompt_of_length
from dovetail.spec_decode.experiments.load.records import LoadRecord
from dovetail.spec_decode.experiments.load.results import describe_load, judge_queue, queue_growth
from dovetail.spec_decode.experiments.load.rows import load_names
from dovetail.spec_decode.experiments.report import Report, as_data
from dovetail.spec_decode.experiments.schema import LevelsSection, parse_experiment
from dovetail.spec_decode.experiments.sections import all_sections
from dovetail.spec_decode.experiments.serving import Clock, serve
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

SEGMENTS, REQUESTS = 5, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load")
    save_tiny_model(folder / "model", tiny_config("llama", vocab_size=64))
    prompts = [[(a * b) % 60 + 1 for b in range(1, 6)] * 3 for a in range(1, 9)]
    (folder / "set.jsonl").write_text("\n".join(json.dumps({"prompt_token_ids": ids}) for ids in prompts))
    return folder


def experiment(load: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config = {
        "model": {"path": "./model", "tokenizer_mode": "none", "dtype": "float32"},
        "cache": {"num_blocks": 200},
        "executor": {"threads": 1},
        "attention": "sdpa",
    }
    lookup = {"name": "ngram", "num_tokens": 3, "length": "fixed", "min_match": 1}
    return {
        "config": config,
        "arms": {"lookup": {"drafter": lookup}},
        "workload": {"data": "set.jsonl"},
        "sampling": {"max_tokens": 6, "ignore_eos": True},
        "repetitions": 1,
        "warmup": 0,
        "compatibility": False,
        "load": {"requests": REQUESTS, "segments": SEGMENTS} | load,
    } | changes


def run(folder: Path, data: dict[str, Any], journal: Path, *, resume: bool = False) -> Report:
    return run_experiment(parse_experiment(data, "test"), folder, Procedure(journal, resume), allow=False)


def test_every_arm_has_the_same_requests_at_the_same_times(folder: Path, tmp_path: Path) -> None:
    data = experiment({"rates": [100, 400], "slo": {"ttft": 10_000}})
    report = run(folder, data, tmp_path / "j.jsonl")
    load = report.load
    assert load is not None
    assert load.measured == load.planned == 2 * SEGMENTS * 3
    sent = {
        (point, arm): [(r.segment, r.arrival, r.prompt) for r in load.requests if (r.point, r.arm) == (point, arm)]
        for point in ("100/s", "400/s")
        for arm in ("plain", "plain-again", "lookup")
    }
    for point in ("100/s", "400/s"):
        assert len(sent[point, "plain"]) == SEGMENTS * REQUESTS
        assert sorted(sent[point, "plain"]) == sorted(sent[point, "lookup"]) == sorted(sent[point, "plain-again"])
    # At four times the rate, the same gaps in a quarter of the time.
    slow, fast = (sorted(a for _, a, _ in sent[point, "plain"]) for point in ("100/s", "400/s"))
    assert slow == pytest.approx([4 * time for time in fast])
    for record in load.requests:
        assert 0 <= record.queued <= record.ttft <= record.e2e
        assert record.tokens == 6
    assert {s.goodput for s in load.states} == {1.0}
    # And all of it is in the data, the rows and the sections.
    rows = report.load_rows()
    assert {row.values["load.point"] for row in rows} == {"100/s", "400/s"}
    assert all(list(row.values) and set(row.values) == set(load_names()) for row in rows)
    assert len(Condition("load.ttft > 0 and load.rate == 400").failures(rows)) == 1
    assert json.loads(json.dumps(as_data(report)))["load"]["slo_ms"] == {"ttft": 10_000}
    tables = {}
    write_tables(as_data(report), tmp_path / "tables")
    for path in (tmp_path / "tables").iterdir():
        with path.open(newline="") as file:
            tables[path.stem] = list(csv.DictReader(file))
    assert {row["batch"] for row in tables["results"]} == {"1"}
    assert not any(name.startswith(("load.", "throughput")) for row in tables["results"] for name in row)
    assert [row["load.point"] for row in tables["load_results"]] == ["100/s", "400/s"]
    times = [float(row["ttft_s"]) for row in tables["load_requests"]]
    assert times == pytest.approx([record.ttft for record in load.requests], abs=1e-6)
    (section,) = [section for section in all_sections(report) if section.title == "Open-loop load"]
    assert [len(table.rows) for table in section.tables] == [2 * 2 * 4, 2 * 3]


def test_segments_that_a_journal_has_are_not_run_again(folder: Path, tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    whole = run(folder, experiment({"rates": [300]}), journal)
    # As if it had been killed in the fourth segment.
    lines = journal.read_text().splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if line.startswith('{"segment"')]
    assert len(places) == SEGMENTS * 3
    journal.write_text("".join(lines[: places[3]]) + lines[places[3]][:40])
    again = run(folder, experiment({"rates": [300]}), journal, resume=True)
    assert whole.load is not None
    assert again.load is not None
    assert plain(again.load.requests[: 3 * REQUESTS]) == plain(whole.load.requests[: 3 * REQUESTS])
    assert again.load.measured == whole.load.measured
    assert len(journal.read_text().splitlines()) == len(lines) + 1


def test_a_load_that_was_not_measured_is_said_and_holds_conditions(folder: Path, tmp_path: Path) -> None:
    """The limit passes before the first segment."""
    parsed = parse_experiment(experiment({"rates": [300, 600]}), "test")
    report = run_experiment(parsed, folder, Procedure(tmp_path / "j.jsonl", max_minutes=1e-9), allow=False)
    assert report.load is not None
    assert (report.load.measured, report.load.planned) == (0, 2 * SEGMENTS * 3)
    rows = report.load_rows()
    assert [(row.label, row.values["load.rate"]) for row in rows] == [
        ("lookup@3, 300/s", 300),
        ("lookup@3, 600/s", 600),
    ]
    assert all(set(row.values) == set(load_names()) for row in rows)
    failures = Condition("load.e2e < 1000").failures(rows)
    assert [failure.label for failure in failures] == [row.label for row in rows]
    assert "no segment was measured" in failures[0].message
    assert any("0 of 30 segments of the load" in warning for warning in report.warnings)
    (section,) = [section for section in all_sections(report) if section.title == "Open-loop load"]
    assert section.notes == ["0 of 30 segments were measured."]
    json.dumps(as_data(report), allow_nan=False)


def test_an_arm_that_did_not_run_holds_conditions_on_the_load(folder: Path, tmp_path: Path) -> None:
    data = experiment({"rates": [300], "segments": 1}, keep_going=True)
    data["arms"]["broken"] = {"drafter": {"name": "ngram", "num_tokens": 0}}
    rows = run(folder, data, tmp_path / "j.jsonl").load_rows()
    assert [failure.label for failure in Condition("load.rate > 1000").failures(rows)] == ["broken"]
    assert not Condition("ran and load.rate > 1000").failures(rows)


TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{46 + i // 10:02d}.{i % 10}000000,{5 + 7 * i},{1 + i % 4}\n" for i in range(17)
)


def test_a_trace_gives_times_and_lengths(folder: Path, tmp_path: Path) -> None:
    (folder / "azure.csv").write_text(TRACE)
    report = run(folder, experiment({"trace": "azure.csv", "speeds": [10, 20]}), tmp_path / "j.jsonl")
    load = report.load
    assert load is not None
    own = [r for r in load.requests if (r.point, r.arm) == ("trace x10", "lookup")]
    # Two whole segments of eight; the seventeenth request fills none.
    expected = [(segment, round(0.01 * place, 5)) for segment in range(2) for place in range(8)]
    assert sorted((r.segment, round(r.arrival, 5)) for r in own) == expected
    assert [r.tokens for r in sorted(own, key=lambda r: (r.segment, r.arrival))] == [1 + i % 4 for i in range(16)]
    assert [r.rate for r in own] == pytest.approx([100.0] * 16)
    assert {s.queue for s in load.states} == {"too few segments"}


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=5), st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_prompts_of_a_length_end_as_the_data_sets_do(prompts: list[list[int]], length: int) -> None:
    for place in range(len(prompts)):
        found = prompt_of_length(prompts, place, length)
        assert len(found) == length
        before = [token for turn in range(length) for p in prompts[place + 1 :] + prompts[: place + 1] for token in p]
        assert found == before[-length:]


class Stepping:
    """A clock that a test moves: each look takes a hundredth, and sleeping takes what it was asked for."""

    def __init__(self) -> None:
        self.time = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        self.time += 0.01
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LLMEngine]:
    with LLMEngine.from_config(
        model={"path": str(folder / "model"), "tokenizer_mode": "none", "dtype": "float32"},
        cache={"num_blocks": 100},
        executor={"threads": 1},
    ) as engine:
        yield engine


def test_requests_are_added_at_their_time_and_an_idle_engine_sleeps(engine: LLMEngine) -> None:
    clock = Stepping()
    params = [SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False, output_kind="delta")] * 3
    prompts = [[1, 2, 3], [4, 5], [6]]
    # The second comes while the first is under way, the third long after both.
    found = serve(engine, ["a", "b", "c"], prompts, params, [0.0, 0.015, 50.0], Clock(clock.now, clock.sleep))
    assert [len(one.token_ids) for one in found] == [3, 3, 3]
    for one, arrival in zip(found, [0.0, 0.015, 50.0], strict=True):
        assert one.times[0] > arrival
        assert one.times == sorted(one.times)
        assert one.last is not None
        assert one.last.metrics.arrival_time == pytest.approx(100.01 + arrival)
    assert found[1].times[0] < found[0].times[-1] < 50
    assert found[2].times[0] < 51
    # Once, from when both had finished until the third: no spinning.
    assert len(clock.slept) == 1
    assert 49 < clock.slept[0] < 50


def test_a_failure_leaves_no_request_behind(engine: LLMEngine) -> None:
    class Broken(Stepping):
        def sleep(self, seconds: float) -> None:
            raise KeyboardInterrupt

    clock = Broken()
    params = [SamplingParams(temperature=0, max_tokens=2, detokenize=False, output_kind="delta")] * 2
    with pytest.raises(KeyboardInterrupt):
        serve(engine, ["a", "b"], [[1], [2]], params, [0.0, 90.0], Clock(clock.now, clock.sleep))
    assert not engine.has_unfinished_requests()


def simulated(
    load: float, seed: int, *, arm: str = "plain", segments: int = 12, requests: int = 64
) -> list[LoadRecord]:
    """One server that takes a second for each request, by Lindley's recursion; `load` requests arrive per second."""
    records = []
    for segment in range(segments):
        gaps = np.random.default_rng([seed, segment]).exponential(1 / load, requests)
        arrivals, free = np.cumsum(gaps) - gaps[0], 0.0
        for prompt, arrival in enumerate(arrivals):
            start = max(free, float(arrival))
            free = start + 1.0
            queued = start - float(arrival)
            place = {"repetition": 0, "segment": segment, "prompt": prompt, "arrival": float(arrival)}
            times = {"queued": queued, "ttft": queued + 0.2, "e2e": queued + 1.0}
            point = {"point": f"{load:g}/s", "rate": load, "arm": arm, "length": None}
            records.append(LoadRecord(**point, **place, **times, tokens=9, drafted=0, accepted=0))
    return records


@pytest.mark.parametrize("seed", range(4))
def test_a_queue_that_grows_is_told_from_one_that_does_not(seed: int) -> None:
    resampler = Resampler(0, draws=1000)
    found = {}
    for load in (0.5, 2.0):
        records = simulated(load, seed)
        growth = queue_growth(records, resampler)
        found[load] = judge_queue(records, growth)
        if load == 2.0:
            # Of two that come each second one is served, which is known here.
            assert load * (1 - growth.value) == pytest.approx(1.0, rel=0.15)
    assert found == {0.5: "keeps up", 2.0: "overloaded"}


def test_short_segments_and_few_ones_say_nothing_about_the_queue() -> None:
    resampler = Resampler(0, draws=1000)
    short = simulated(8.0, 0, requests=8)
    assert judge_queue(short, queue_growth(short, resampler)) == "too short"
    (state,) = describe_load(short, LevelsSection(), resampler, 12).states
    # The first takes a second, in which 8 come: four times as many, and then it tells.
    assert state.enough_requests == 32
    longer = simulated(8.0, 0, requests=40)
    assert judge_queue(longer, queue_growth(longer, resampler)) == "overloaded"
    few = simulated(2.0, 0, segments=4)
    assert judge_queue(few, queue_growth(few, resampler)) == "too few segments"


def test_ratios_are_paired_by_segment_and_goodput_by_difference() -> None:
    base, own = (
        simulated(0.8, 1),
        [LoadRecord(**{**vars_of(r), "arm": "fast", "ttft": r.ttft / 2, "e2e": r.e2e / 2}) for r in simulated(0.8, 1)],
    )
    report = describe_load([*base, *own], LevelsSection(e2e=1500), Resampler(0, draws=1000), 24)
    speeds = {speed.metric: speed for speed in report.speed}
    for metric in ("ttft", "itl", "e2e"):
        assert speeds[metric].ratio.value == pytest.approx(2.0)
        assert speeds[metric].verdict == "faster"
    assert speeds["tokens/s"].ratio.value >= 1.0
    states = {state.arm: state for state in report.states}
    met = {arm: np.mean([r.e2e <= 1.5 for r in side]) for arm, side in (("plain", base), ("fast", own))}
    assert {arm: state.goodput for arm, state in states.items()} == pytest.approx(met)
    gain = states["fast"].goodput_gain
    assert gain is not None
    assert gain.value == pytest.approx(met["fast"] - met["plain"])
    assert gain.low is not None
    assert 0 < gain.low < gain.value


def vars_of(record: LoadRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in LoadRecord.__slots__}


def test_the_load_of_the_example_is_valid() -> None:
    lines = EXAMPLE.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("# load:"))
    lines[start : start + 3] = [line.removeprefix("# ").removeprefix("#") for line in lines[start : start + 3]]
    load = parse_experiment(yaml.safe_load("\n".join(lines)), "example").load
    assert load is not None
    assert (load.rates, load.slo.ttft) == ((1.0, 2.0), 1000.0)


@pytest.mark.parametrize(
    ("load", "says"),
    [
        ({}, "either rates, in requests per second, or a trace"),
        ({"rates": [1], "trace": "x.csv"}, "either rates"),
        ({"rates": [0]}, "greater than 0"),
        ({"rates": [-1]}, "greater than 0"),
        ({"rates": [1], "speeds": [2]}, "speeds belong to a trace"),
        ({"rates": [1], "burstiness": 0.5}, "give it with arrivals: gamma"),
        ({"rates": [1], "arrivals": "gamma"}, "give it with arrivals: gamma"),
        ({"trace": "x.csv", "arrivals": "constant"}, "leave arrivals out"),
        ({"rates": [1], "requests": 4}, "greater than or equal to 8"),
        ({"rates": [1], "slo": {"tpot": 3}}, "unknown key 'load.slo.tpot'"),
    ],
)
def test_loads_that_cannot_be_are_refused(load: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_experiment(experiment(load), "test")


def lines(times: Sequence[str], tokens: int = 5) -> str:
    return "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{time},{tokens},2\n" for time in times)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (lines(["0", "2", "1", *map(str, range(3, 12))]), "request 3 arrives before the one above it"),
        (lines(["0", "1"]), "has 2 requests, fewer than one segment"),
        (lines(["0"] * 9), "all requests of a segment arrive at once"),
        (lines(list(map(str, range(9))), tokens=100_000), "9 of 9 requests exceed max_model_len"),
    ],
)
def test_traces_that_cannot_be_are_refused(folder: Path, tmp_path: Path, text: str, says: str) -> None:
    (folder / "bad.csv").write_text(text)
    with pytest.raises(ConfigError, match=says):
        run(folder, experiment({"trace": "bad.csv"}), tmp_path / "j.jsonl")


def test_constant_gaps_are_equal(folder: Path, tmp_path: Path) -> None:
    data = experiment({"rates": [200], "arrivals": "constant", "segments": 1})
    report = run(folder, data, tmp_path / "j.jsonl")
    assert report.load is not None
    arrivals = sorted(r.arrival for r in report.load.requests if r.arm == "plain")
    assert [b - a for a, b in pairwise(arrivals)] == pytest.approx([1 / 200] * (REQUESTS - 1))
