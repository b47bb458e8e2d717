"""Reports of several machines: what is averaged over what, and which reports cannot be put together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.bootstrap import Resampler
from dovetail.spec_decode.experiments.cli import app
from dovetail.spec_decode.experiments.columns import to_columns
from dovetail.spec_decode.experiments.merge import agreement, merge_reports, pool
from dovetail.spec_decode.experiments.records import RequestRecord
from dovetail.spec_decode.experiments.saved_report import SavedReport
from dovetail.spec_decode.experiments.schema import BASELINE

TOKENS = 8


def report(logs: NDArray[np.float64], *, pace: float, **changes: Any) -> SavedReport:
    """A run at so many seconds per group, whose arm `a` is by so much (logarithm) faster: [groups, repetitions]."""
    records = []
    for (group, repetition), log in np.ndenumerate(logs):
        for arm, seconds in ((BASELINE, pace), ("a", pace / math.exp(log))):
            times = [seconds * (index + 1) / TOKENS for index in range(TOKENS)]
            fields = (group, "all", list(range(TOKENS)), times, 0, 0, [], "length")
            records.append(RequestRecord(arm, 2 if arm == "a" else None, 1, repetition, group, *fields))
    provenance: dict[str, Any] = {
        "date": "2026-01-01",
        "experiment": {"name": "e", "sampling": {"max_tokens": TOKENS}, "repetitions": logs.shape[1]},
        "model": {"path": "m", "sampled_sha256": "1"},
        "workload": {"data": "d", "sha256": "2"},
        "machine": {"cpu": f"at {pace}", "usable_cpus": 2},
        "arms": {BASELINE: {}, "a": {}},
        "extent": {"decided": None},
    }
    for key, value in changes.items():
        provenance[key] = provenance[key] | value
    verdict = {"arm": "a", "length": 2, "batch": 1, "verdict": "identical", "divergences": []}
    return SavedReport.model_validate(
        {"dovetail_ab": 1, "provenance": provenance, "requests": to_columns(records), "equality": [verdict]}
    )


def draw(seed: int, groups: int, repetitions: int, effect: float) -> NDArray[np.float64]:
    return effect + np.random.default_rng(seed).normal(0, 0.05, (groups, repetitions))


def test_machines_have_equal_weights_and_their_speed_cancels() -> None:
    logs = draw(0, 12, 3, 0.2), draw(1, 12, 1, 0.3)
    merged = merge_reports({"slow": report(logs[0], pace=9.0), "fast": report(logs[1], pace=0.5)})
    (speed,) = [item for item in merged.speed if item.metric == "tokens/s"]
    expected = math.exp((logs[0].mean() + logs[1].mean()) / 2)
    assert speed.ratio.value == pytest.approx(expected)
    assert [one.value for one in speed.by_run] == pytest.approx([math.exp(own.mean()) for own in logs])
    assert (speed.label, speed.verdict, speed.left_out) == ("a@2", "faster", 0)
    assert speed.agreement_p is not None
    assert speed.agreement_p < 0.05
    assert [run.cpu for run in merged.runs] == ["at 9.0", "at 0.5"]


def test_groups_that_a_run_has_not_measured_are_left_out() -> None:
    logs = draw(0, 12, 1, 0.2), draw(1, 7, 1, 0.2)
    merged = merge_reports({"whole": report(logs[0], pace=1.0), "stopped": report(logs[1], pace=2.0)})
    (speed,) = [item for item in merged.speed if item.metric == "tokens/s"]
    assert speed.left_out == 5
    assert math.log(speed.ratio.value) == pytest.approx((logs[0][:7].mean() + logs[1].mean()) / 2)


def test_the_interval_covers_and_runs_that_agree_are_seldom_accused() -> None:
    """Prompts gain the same on all machines, which makes runs alike: 8 groups, 3 runs, 400 experiments."""
    generator, resampler = np.random.default_rng(0), Resampler(0, draws=1000)
    covered = accused = found = 0
    for _ in range(400):
        prompts = generator.normal(0.1, 0.2, 8)
        runs = [dict(enumerate(prompts + generator.normal(0, 0.05, 8))) for _ in range(3)]
        estimate = resampler.mean(list(pool(runs).values()))
        assert estimate.low is not None
        assert estimate.high is not None
        covered += estimate.low <= 0.1 <= estimate.high
        p = agreement(runs, range(8), resampler)
        assert p is not None
        accused += p < 0.05
        other: Mapping[int, float] = {group: value + 0.15 for group, value in runs[2].items()}
        p = agreement([*runs[:2], other], range(8), resampler)
        assert p is not None
        found += p < 0.05
    assert covered / 400 >= 0.93
    assert accused / 400 <= 0.07
    assert found / 400 >= 0.7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experiment": {"sampling": {"max_tokens": 9}}}, "experiment.sampling"),
        ({"experiment": {"config": {"attention": "x"}}}, "experiment.config"),
        ({"model": {"sampled_sha256": "3"}}, "model.sampled_sha256: 1 / 3"),
        ({"workload": {"sha256": "3"}}, "workload.sha256: 2 / 3"),
        ({"extent": {"decided": [1]}}, "run until it was decided"),
    ],
)
def test_reports_of_something_else_are_refused(changes: dict[str, Any], words: str) -> None:
    logs = draw(0, 6, 1, 0.1)
    with pytest.raises(ConfigError) as error:
        merge_reports({"a": report(logs, pace=1.0), "b": report(logs, pace=2.0, **changes)})
    assert words in str(error.value)


def test_one_run_counts_once() -> None:
    one = report(draw(0, 6, 1, 0.1), pace=1.0)
    with pytest.raises(ConfigError, match="a and b are of the same run"):
        merge_reports({"a": one, "b": one})
    with pytest.raises(ConfigError, match="give two or more"):
        merge_reports({"a": one})


def with_arms(seed: int, *, pace: float, **changes: Any) -> SavedReport:
    """Two arms and the control, of 8 groups; the control is far from plain."""
    own = report(draw(seed, 8, 1, 0.3), pace=pace, **changes)
    records = own.records()
    others = [("plain-again", None, 0.5), ("b", 2, 0.9)]
    for arm, length, factor in others:
        for record in [one for one in records if one.arm == BASELINE]:
            noise = 1 + 0.01 * np.random.default_rng([seed, record.group, len(arm)]).normal()
            times = [factor * noise * time for time in record.times]
            records.append(replace(record, arm=arm, length=length, times=times))
    return SavedReport.model_validate(own.model_dump() | {"requests": to_columns(records)})


def test_one_family_without_the_control_and_with_pairs() -> None:
    merged = merge_reports({"x": with_arms(0, pace=1.0), "y": with_arms(1, pace=2.0)})
    verdicts = {item.label: item.verdict for item in merged.speed if item.metric == "tokens/s" and not item.is_pair}
    assert verdicts == {"plain-again": "not judged", "a@2": "faster", "b@2": "faster"}
    (pair,) = [item for item in merged.speed if item.is_pair]
    assert (pair.label, pair.against, pair.verdict) == ("b@2", "a@2", "slower")
    # At batch 1, requests as long end to end are the same question.
    assert "e2e" not in {item.metric for item in merged.speed}


def test_the_baseline_of_the_reports_is_kept_and_another_may_be_chosen() -> None:
    runs = {str(seed): with_arms(seed, pace=seed + 1.0, experiment={"baseline": "a"}) for seed in range(2)}
    found = {}
    for chosen in (None, "b"):
        merged = merge_reports(runs, chosen)
        ratios = {
            item.label: item.ratio.value for item in merged.speed if item.metric == "tokens/s" and not item.is_pair
        }
        found[merged.baseline] = ratios
    assert found["a@2"]["b@2"] == pytest.approx(1 / found["b@2"]["a@2"])
    assert set(found["a@2"]) == {"plain", "plain-again", "b@2"}
    with pytest.raises(ConfigError, match="the reports have several baselines"):
        merge_reports({"x": runs["0"], "y": with_arms(1, pace=2.0)})
    with pytest.raises(ConfigError, match="baseline 'c' is no arm"):
        merge_reports(runs, "c")


def test_a_run_that_went_on_is_the_same_run() -> None:
    """It has more requests than before; some are shared."""
    logs = draw(0, 12, 1, 0.1)
    short, long = report(logs[:6], pace=1.0), report(logs, pace=1.0)
    with pytest.raises(ConfigError, match="short and long are of the same run"):
        merge_reports({"short": short, "long": long})
    # Of which nothing is shared any more, by its name.
    name = {"extent": {"decided": None, "run": "1"}}
    with pytest.raises(ConfigError, match="x and y are of the same run"):
        merge_reports({"x": report(logs, pace=1.0, **name), "y": report(logs, pace=2.0, **name)})


def test_the_command_prints_and_writes_it(tmp_path: Path) -> None:
    paths = []
    for seed, pace in ((0, 1.0), (1, 2.0)):
        paths.append(tmp_path / f"{seed}.json")
        paths[-1].write_text(report(draw(seed, 6, 2, 0.2), pace=pace).model_dump_json())
    out, page = tmp_path / "merged.json", tmp_path / "merged.html"
    found = CliRunner().invoke(app, ["merge", *map(str, paths), "-o", str(out), "--html", str(page)])
    assert found.exit_code == 0, found.output + repr(found.exception)
    assert "p they agree" in found.output
    data = json.loads(out.read_text())
    assert [run["name"] for run in data["runs"]] == [str(path) for path in paths]
    assert {item["metric"] for item in data["speed"]} == {"tokens/s", "itl", "ttft"}
    assert "equal weights" in page.read_text()
