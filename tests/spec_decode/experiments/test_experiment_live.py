"""`dovetail ab live`: statistics on records of known truth, and what makes them doubtful."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.bootstrap import (
    MIN_GROUPS,
    Resampler,
    multinomial_p,
    p_values,
    reaches,
    studentized_difference,
)
from dovetail.spec_decode.experiments.cli import app
from dovetail.spec_decode.experiments.live.records import LiveTraffic, read_live
from dovetail.spec_decode.experiments.live.report import LiveReport, analyse, verdict_lines
from dovetail.spec_decode.experiments.speed import PER_REQUEST

EXPERIMENTS = 1000
Record = dict[str, Any]


def design(*arms: tuple[str, float, str | None], **changes: Any) -> Record:
    made = {
        "event": "experiment",
        "design": "d1",
        "name": "drafts",
        "arms": [{"name": name, "share": share, "drafter": drafter} for name, share, drafter in arms],
        "unit": "slice",
        "slice_s": 60.0,
        "traffic": 1.0,
        "seed": 0,
    }
    return made | changes


TWO = (("plain", 0.5, None), ("lookup", 0.5, "lookup"))


def request(arm: str, unit: str, **changes: Any) -> Record:
    """One of 21 tokens in 2.2 seconds."""
    made = {
        "event": "request",
        "design": "d1",
        "experiment": "drafts",
        "arm": arm,
        "unit": unit,
        "time": 0.0,
        "num_running": 1,
        "num_others": 0,
        "finish_reason": "stop",
        "queue": 0.1,
        "ttft": 0.2,
        "decode": 2.0,
        "e2e": 2.2,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "output_tokens": 21,
        "n": 1,
        "preemptions": 0,
        "rounds": 8 if arm == "lookup" else 0,
        "drafted": 24 if arm == "lookup" else 0,
        "accepted": 12 if arm == "lookup" else 0,
        "drafter_error": False,
        "weight_version": 0,
    }
    return made | changes


def traffic(
    effect: float = 1.0, units: int = 40, *, seed: int = 0, change: Callable[[Record], Record] = lambda record: record
) -> list[Record]:
    """Slices of either arm in turn, each with a speed of its own and a few requests; `lookup` is `effect` times as
    fast. `change` is applied to each request."""
    generator = np.random.default_rng(seed)
    records = []
    for number in range(2 * units):
        arm = ("plain", "lookup")[number % 2]
        of_slice = generator.normal(0, 0.1)
        for index in range(1 + generator.integers(0, 5)):
            slowness = math.exp(of_slice + generator.normal(0, 0.2)) / (effect if arm == "lookup" else 1.0)
            times = {"ttft": 0.2 * slowness, "decode": 2.0 * slowness, "e2e": 2.2 * slowness}
            records.append(change(request(arm, f"{number:04x}", time=60.0 * number + index, **times)))
    return records


def write(path: Path, lines: Iterable[Record]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def report_of(tmp_path: Path) -> Callable[..., LiveReport]:
    def make(records: Sequence[Record], described: Record | None = None) -> LiveReport:
        return analyse(read(tmp_path, records, described), draws=2000)

    return make


def read(folder: Path, records: Sequence[Record], described: Record | None = None) -> LiveTraffic:
    return read_live(write(folder / "arms.jsonl", [described or design(*TWO), *records]), None)


def simulated(generator: np.random.Generator, units: int, effect: float) -> tuple[np.ndarray, np.ndarray]:
    """Sums of log speeds and numbers of requests of units, [S, n] each: units differ, and so do their sizes."""
    counts = 1 + generator.poisson(3, (EXPERIMENTS, units))
    of_unit = effect + generator.normal(0, 0.2, counts.shape)
    return counts * of_unit + generator.normal(0, 0.3, counts.shape) * np.sqrt(counts), counts.astype(float)


def judged(units: tuple[int, int], effect: float, seed: int) -> tuple[float, float]:
    """Share of intervals that hold `effect`, and of experiments that decide there is one."""
    generator, resampler = np.random.default_rng(seed), Resampler(seed, draws=1000)
    own, other = (simulated(generator, n, e) for n, e in zip(units, (effect, 0.0), strict=True))
    weights = [resampler.weights(n, stream) for stream, n in enumerate(units)]
    value, error, deviations = studentized_difference((*own, weights[0]), (*other, weights[1]))
    below, above = reaches(error, deviations)
    held = (value - below <= effect) & (value + above >= effect)
    return float(held.mean()), float(np.mean(p_values(value, error, deviations) < 0.05))


@pytest.mark.parametrize("units", [(8, 8), (24, 24), (12, 60)])
def test_no_effect_is_decided_one_time_in_twenty(units: tuple[int, int]) -> None:
    held, decided = judged(units, 0.0, seed=5)
    # Two standard errors of 1,000 experiments, and few units make intervals wide rather than wrong.
    assert 0.93 <= held <= 0.99
    assert 0.01 <= decided <= 0.065


def test_an_effect_is_found_and_covered() -> None:
    held, decided = judged((60, 60), math.log(1.2), seed=6)
    assert 0.93 <= held <= 0.97
    assert decided > 0.9


def test_units_must_be_drawn_rather_than_requests() -> None:
    """The check can fail: requests of one unit are alike, and as independent ones they decide what is not there."""
    generator, resampler = np.random.default_rng(7), Resampler(7, draws=500)
    of_unit = generator.normal(0, 0.2, (2, 400, 10, 1))
    values = (of_unit + generator.normal(0, 0.1, (2, 400, 10, 12))).reshape(2, 400, 120)
    samples = [(v, np.ones_like(v), resampler.weights(120, stream)) for stream, v in enumerate(values)]
    decided = p_values(*studentized_difference(samples[0], samples[1])) < 0.05
    assert decided.mean() > 0.3


def test_a_difference_is_what_its_definition_says() -> None:
    """By loops over draws."""
    generator, resampler = np.random.default_rng(8), Resampler(8, draws=50)
    samples = [(generator.normal(2, 1, n), generator.integers(1, 5, n).astype(float)) for n in (7, 9)]

    def linearised(top: np.ndarray, bottom: np.ndarray) -> tuple[float, float]:
        value, count = top.sum() / bottom.sum(), len(top)
        return value, math.sqrt(((top - value * bottom) ** 2).sum() * count / (count - 1)) / bottom.sum()

    values, errors = zip(*(linearised(*sample) for sample in samples), strict=True)
    expected = []
    for draw in range(50):
        drawn = []
        for stream, (top, bottom) in enumerate(samples):
            picked = np.repeat(np.arange(len(top)), resampler.weights(len(top), stream)[:, draw].astype(int))
            drawn.append(linearised(top[picked], bottom[picked]))
        moved = (drawn[0][0] - values[0]) - (drawn[1][0] - values[1])
        expected.append(moved / math.hypot(drawn[0][1], drawn[1][1]))
    parts = [(top[None], bottom[None], resampler.weights(len(top), s)) for s, (top, bottom) in enumerate(samples)]
    value, error, deviations = studentized_difference(parts[0], parts[1])
    assert value[0] == pytest.approx(values[0] - values[1])
    assert error[0] == pytest.approx(math.hypot(*errors))
    assert deviations[0] == pytest.approx(expected)
    found = resampler.difference(*((top.tolist(), bottom.tolist()) for top, bottom in samples))
    assert found.value == pytest.approx(value[0])
    assert found.groups == 16


def test_draws_of_two_samples_of_one_size_are_independent() -> None:
    resampler = Resampler(0, draws=2000)
    one, other = resampler.weights(10), resampler.weights(10, stream=1)
    assert abs(np.corrcoef(one[0], other[0])[0, 1]) < 0.1


def test_a_mismatch_has_its_exact_probability() -> None:
    """All outcomes of twelve draws, enumerated."""
    counts, shares = (9, 2, 1), (0.5, 0.25, 0.25)

    def chi_square(found: Sequence[int]) -> float:
        return sum((n - 12 * share) ** 2 / (12 * share) for n, share in zip(found, shares, strict=True))

    def probability(found: Sequence[int]) -> float:
        ways = math.factorial(12) / math.prod(math.factorial(n) for n in found)
        return ways * math.prod(share**n for n, share in zip(found, shares, strict=True))

    outcomes = [found for found in itertools.product(range(13), repeat=3) if sum(found) == 12]
    exact = sum(probability(found) for found in outcomes if chi_square(found) >= chi_square(counts) - 1e-9)
    assert multinomial_p(counts, shares) == pytest.approx(exact, abs=0.01)


def test_a_faster_arm_is_found(report_of: Callable[..., LiveReport]) -> None:
    report = report_of(traffic(effect=1.3))
    found = {speed.metric: speed for speed in report.speed}
    assert set(found) == {PER_REQUEST, "e2e", "itl", "ttft"}
    for speed in found.values():
        assert speed.decision.verdict == "faster"
        assert speed.ratio.low is not None
        assert speed.ratio.low < 1.3 < speed.ratio.high
    assert found["e2e"].own < found["e2e"].baseline
    assert found[PER_REQUEST].own > found[PER_REQUEST].baseline
    assert report.warnings == []
    (line,) = verdict_lines(report)
    assert line.startswith("lookup: faster, 1.")
    assert line.endswith("40 slices against 40 of plain")


def test_without_effect_nothing_is_decided(report_of: Callable[..., LiveReport]) -> None:
    report = report_of(traffic(effect=1.0))
    assert {speed.decision.verdict for speed in report.speed} == {"undecided"}
    assert all(speed.decision.groups_to_decide for speed in report.speed)


def test_times_are_geometric_means_of_what_was_recorded(report_of: Callable[..., LiveReport]) -> None:
    records = [
        request("plain", "a", e2e=1.0, decode=0.8),
        request("plain", "b", e2e=4.0, decode=3.8),
        request("plain", "b", finish_reason="abort", e2e=1000.0),
        request("lookup", "c", e2e=1.0, decode=1.0, output_tokens=22, n=2),
    ]
    report = report_of(records)
    found = {speed.metric: speed for speed in report.speed}
    assert (found["e2e"].baseline, found["e2e"].own) == (pytest.approx(2.0), pytest.approx(1.0))
    assert found["e2e"].ratio.value == pytest.approx(2.0)
    assert found["itl"].own == pytest.approx(1.0 / 10), "of a completion"
    plain, lookup = report.arms
    assert (plain.num_units, plain.num_requests, plain.num_unfinished) == (2, 3, 1)
    assert plain.medians["e2e"] == pytest.approx(2.5)
    (acceptance,) = report.acceptance
    assert (acceptance.arm, acceptance.rate.value, acceptance.round_length.value) == ("lookup", 0.5, 2.5)
    assert lookup.output_tokens == 22


def test_very_many_units_are_drawn_in_groups(report_of: Callable[..., LiveReport]) -> None:
    generator = np.random.default_rng(0)
    records = [
        request(("plain", "lookup")[n % 2], f"{n:016x}", e2e=float(2 + generator.random()), time=float(n))
        for n in range(3000)
    ]
    report = report_of(records, design(*TWO, unit="request"))
    (speed,) = [speed for speed in report.speed if speed.metric == "e2e"]
    assert speed.ratio.groups == 800
    assert speed.ratio.low is not None
    assert speed.ratio.high - speed.ratio.low < 0.04


def unless(holds: Callable[[Record], bool]) -> Callable[[Record], Record]:
    """Has records out of which the condition holds as of an arm that lost them."""
    return lambda record: record | {"experiment": "gone"} if holds(record) else record


DOUBTS: dict[str, tuple[list[Record], str]] = {
    "mismatch": (
        traffic(units=80, change=unless(lambda r: r["arm"] == "lookup" and int(r["unit"], 16) % 4 == 1)),
        r"^sample-ratio mismatch: slices .*plain 80 \(66\.7%, not 50\.0%\)",
    ),
    "few": (traffic(units=6), r"^few slices: plain has 6, lookup has 6\. Let"),
    "too few": (traffic(units=4), rf"^few slices: .*no interval with fewer than {MIN_GROUPS}"),
    "interference": (
        traffic(change=lambda r: r | {"num_others": int(r["unit"], 16) % 3}),
        r"^arms interfere: \d\d% of the requests .* raise slice_s",
    ),
    "level": (
        traffic(change=lambda r: r | {"e2e": r["e2e"] * (1.0 + r["time"] / 2400)}),
        r"^time trend: plain itself had 0\.\d+x the speed",
    ),
    "effect that changes": (
        traffic(change=lambda r: r | {"e2e": r["e2e"] * (2.0 if r["arm"] == "lookup" and r["time"] > 2400 else 1.0)}),
        r"^time trend: lookup had \S+x the speed of plain in the first half .* 0\.\d+x in the second",
    ),
    "aborts": (
        traffic(change=lambda r: r | {"finish_reason": "abort" if r["arm"] == "lookup" and r["e2e"] > 2 else "stop"}),
        r"of the requests of lookup were aborted or failed, and 0\.0% of plain",
    ),
    "weights": (
        traffic(change=lambda r: r | {"weight_version": int(r["time"] > 2400)}),
        r"^the weights were replaced meanwhile \(versions 0 to 1\)",
    ),
    "drafter": (
        traffic(change=lambda r: r | {"drafter_error": r["arm"] == "lookup"}),
        r"^the drafter of lookup raised: (\d+) of \1 requests",
    ),
    "lost": ([*traffic(), {"event": "lost", "lines": 7}], r"^7 lines could not be written"),
    "broken": ([*traffic(), {"event": "request", "arm": 3}], r"^1 lines of .*arms\.jsonl cannot be read"),
    "other design": (
        [request("plain", "a", design="d0"), *traffic()],
        r"^1 requests of drafts are left out: .*configured otherwise",
    ),
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_what_is_doubtful_is_warned_of(report_of: Callable[..., LiveReport], doubt: str) -> None:
    records, expected = DOUBTS[doubt]
    warnings = report_of(records).warnings
    assert len([warning for warning in warnings if re.search(expected, warning)]) == 1, warnings
    assert len(warnings) == 1, warnings


def test_requests_that_share_a_batch_are_told_what_to_draw(report_of: Callable[..., LiveReport]) -> None:
    records = traffic(change=lambda r: r | {"num_others": 1})
    (warning,) = report_of(records, design(*TWO, unit="user")).warnings
    assert "100% of the requests" in warning
    assert "unit: slice" in warning


def test_the_last_design_counts(tmp_path: Path) -> None:
    again = design(("lookup", 0.5, "lookup"), ("plain", 0.5, None), design="d2")
    lines = [design(*TWO), request("plain", "a"), again, request("plain", "b", design="d2"), design(*TWO)]
    found = read_live(write(tmp_path / "arms.jsonl", lines), None)
    assert [record.unit for record in found.records] == ["a"]
    assert found.num_of_other_designs == 1


@pytest.mark.parametrize(
    ("lines", "asked", "message"),
    [
        ([], None, r"describes no experiment: give the file of the sink `experiments`"),
        ([{"event": "step"}], None, r"describes no experiment"),
        ([design(*TWO)], None, r"no request of the experiment 'drafts' .*let it run on"),
        ([design(*TWO), design(*TWO, name="b", design="d2")], None, r"experiments drafts, b: choose one with"),
        ([design(*TWO), request("plain", "a")], "draft", r"no experiment 'draft'; did you mean 'drafts'"),
    ],
)
def test_files_that_say_nothing_are_refused(
    tmp_path: Path, lines: Sequence[Record], asked: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_live(write(tmp_path / "arms.jsonl", lines), asked)


def test_a_baseline_is_an_arm(tmp_path: Path) -> None:
    found = read(tmp_path, traffic(units=6))
    with pytest.raises(ConfigError, match=r"--baseline 'plane' is no arm; did you mean 'plain'"):
        analyse(found, "plane")
    report = analyse(found, "lookup", draws=500)
    assert {speed.arm for speed in report.speed} == {"plain"}


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    file = write(tmp_path / "arms.jsonl", [design(*TWO), *traffic(effect=1.3, units=24)])
    out = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["live", str(file), "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "1. Traffic of drafts" in result.output
    assert "lookup: faster, 1." in result.output
    data = json.loads(out.read_text())
    assert data["dovetail_ab_live"] == 1
    assert data["design"]["arms"][1] == {"name": "lookup", "share": 0.5, "drafter": "lookup"}
    assert {speed["decision"]["verdict"] for speed in data["speed"]} == {"faster"}
    assert set(data["definitions"]["acceptance"]) == {"rate (ratio of sums)", "round length"}
