"""What a report comes to in a few lines, and what a saved one comes to with another baseline."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.bootstrap import Resampler
from dovetail.spec_decode.experiments.cli import app
from dovetail.spec_decode.experiments.headline import Headline, make_headline
from dovetail.spec_decode.experiments.records import label_of
from dovetail.spec_decode.experiments.speed import PLAIN, VariantKey, compare_speed
from tests.spec_decode.experiments.test_families import VARIANTS, plain_report


def headline(speeds: dict[str, float], baseline: VariantKey = PLAIN, **tokens: str) -> Headline:
    compared = compare_speed(plain_report(np.random.default_rng(1), speeds), Resampler(0, draws=2000), baseline)
    equality = {(arm, length, batch): tokens.get(arm, "identical") for arm, length in VARIANTS for batch in (1, 4)}
    return make_headline(compared, equality, label_of, left_out=["gone"], num_warnings=2)


def test_the_best_arm_comes_first_with_all_its_verdicts() -> None:
    found = headline({"b": 1.6, "c": 0.5}, a="lossless")
    best, tokens, undecided, trouble = found.lines()
    assert best.startswith("best: b@")
    assert best.count("faster 1.") >= 2
    assert [best.index(name) for name in ("tokens/s", "ITL", "TTFT", "tokens identical")] == sorted(
        best.index(name) for name in ("tokens/s", "ITL", "TTFT", "tokens identical")
    )
    assert tokens == "tokens: 4 lossless, 6 identical"
    assert undecided.startswith("undecided in tokens/s, ")
    needed = [int(number.replace(",", "")) for number in re.findall(r"= ([\d,]+) prompts would decide it", undecided)]
    assert len(needed) == 3
    assert needed == sorted(needed)
    assert undecided.endswith(" more")
    assert trouble == "left out: gone; 2 warnings"


def test_a_lossy_arm_is_not_the_best_and_is_named() -> None:
    found = headline({"b": 1.6, "a": 1.3}, b="LOSSY")
    assert found.lines()[0].startswith("best: a@")
    assert "not shown to be equal: b@2, batch 1 LOSSY" in found.lines()[1]


def test_without_a_faster_arm_the_nearest_is_named() -> None:
    assert (
        headline({"a": 0.5, "b": 0.5, "c": 0.5})
        .lines()[0]
        .startswith("no arm is faster than plain in tokens/s; nearest: ")
    )


def test_plain_has_no_verdict_on_tokens_where_another_arm_is_the_baseline() -> None:
    found = headline({"b": 1.6}, ("b", 2))
    assert "tokens: 8 identical" in found.lines()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A report in which b is faster than all others."""
    provenance = {"date": "", "experiment": {"seed": 0}, "model": {}, "workload": {}, "machine": {}, "arms": {}}
    equality = [
        {"arm": arm, "length": length, "batch": batch, "verdict": "identical", "divergences": []}
        for arm, length in VARIANTS
        for batch in (1, 4)
    ]
    records = [{**asdict(one), "token_ids": [0] * 16} for one in plain_report(np.random.default_rng(1), {"b": 1.5})]
    columns = {name: [record[name] for record in records] for name in records[0]}
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"dovetail_ab": 1, "provenance": provenance, "requests": columns, "equality": equality}))
    return path


def test_a_saved_report_can_be_compared_with_any_arm(saved: Path) -> None:
    found = CliRunner().invoke(app, ["show", str(saved), "--baseline", "b@2"])
    assert found.exit_code == 0, found.output
    assert "no arm is faster than b@2 in tokens/s" in " ".join(found.output.split())
    assert "plain, batch 1: tokens/s slower 0.6" in " ".join(found.output.split())


def test_a_saved_report_keeps_its_own_baseline(saved: Path) -> None:
    found = CliRunner().invoke(app, ["show", str(saved)])
    assert "best: b@" in found.output


def test_a_baseline_that_is_no_arm_is_refused(saved: Path) -> None:
    found = CliRunner().invoke(app, ["show", str(saved), "--baseline", "d"])
    assert isinstance(found.exception, ConfigError)
    assert "'d' is no arm" in str(found.exception)
