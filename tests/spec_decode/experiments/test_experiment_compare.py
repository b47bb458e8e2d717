"""Two reports side by side, from records that were made by hand."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest

from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.compare import Comparison, compare_reports
from dovetail.spec_decode.experiments.records import RequestRecord, label_among
from dovetail.spec_decode.experiments.saved_report import SavedReport

MODEL = {"path": "/a/model", "sampled_sha256": "x", "dtype": "float32"}
WORKLOAD = {"data": "/a/set.jsonl", "sha256": "y"}
EXPERIMENT = {"seed": 0, "grid": {"batch_sizes": [1]}, "workload": {"data": "/a/set.jsonl", "limit": 8}}


def report(
    arms: dict[str, float],
    *,
    error: str | None = None,
    steps: Sequence[float] = (1.0, 2.0, 3.0),
    drafts: int = 4,
    equality: tuple[str, int] | tuple[str, int, int] = ("identical", 0),
    model: dict[str, Any] | None = None,
    workload: dict[str, Any] | None = None,
    experiment: dict[str, Any] | None = None,
) -> SavedReport:
    """Eight prompts one by one; each arm takes 1 / speed of plain's time, and a drafter may have raised.

    Args:
        steps: when an arm's three tokens came; half of the `drafts` of each request stood.
        equality: the verdict of each arm, how many prompts diverged, and how many of the control.
    """
    columns: dict[str, list[Any]] = {field.name: [] for field in fields(RequestRecord)}
    for arm, speed in {"plain": 1.0, "plain-again": 1.0, **arms}.items():
        is_drafted = arm in arms
        for prompt in range(8):
            own = steps if is_drafted else (1.0, 2.0, 3.0)
            times = [(1 + 0.01 * (prompt % 3)) * step / speed for step in own]
            drafted, stood = (drafts, drafts // 2) if is_drafted else (0, 0)
            row = [arm, 4 if is_drafted else None, 1, 0, prompt, prompt, "all", [1, 2, 3], times, drafted, stood]
            row += [[stood], "length", error if is_drafted else None, [drafted], 0, None]
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
    provenance = {
        "date": "2026-01-01",
        "experiment": experiment or EXPERIMENT,
        "model": model or MODEL,
        "workload": workload or WORKLOAD,
        "machine": {},
        "arms": {},
    }
    verdict, diverged, *control = equality
    own = {"verdict": verdict, "divergences": [{}] * diverged, "control_diverged": sum(control)}
    judged = [{"arm": arm, "length": 4, "batch": 1, **own} for arm in arms]
    found = {"dovetail_ab": 1, "provenance": provenance, "requests": columns, "equality": judged}
    return SavedReport.model_validate(found)


def compare(old: SavedReport, new: SavedReport, *, allow: bool = False) -> Comparison:
    return compare_reports(old, new, ("old", "new"), allow=allow)


def worse(found: Comparison) -> set[tuple[str, str]]:
    return {(change.label, change.what) for change in found.changes if change.verdict == "worse"}


def test_an_arm_that_is_gone_is_worse() -> None:
    found = compare(report({"x": 2.0, "y": 2.0}), report({"x": 2.0}))
    assert [label.partition(",")[0][0] for label, what in worse(found) if what == "arm"] == ["y"]
    assert worse(compare(report({"x": 2.0}), report({"x": 2.0, "y": 2.0}))) == set()


def test_all_arms_gone_is_worse_and_no_error() -> None:
    assert len(worse(compare(report({"x": 2.0}), report({})))) == 1


def test_a_cell_that_another_grid_does_not_ask_for_is_no_regression() -> None:
    other = report({"x": 2.0}, experiment=EXPERIMENT | {"grid": {"batch_sizes": [2]}})
    other = other.model_copy(update={"requests": other.requests.model_copy(update={"batch": [2] * 24})})
    old = report({"x": 2.0, "y": 2.0})
    assert {label[0] for label, _ in worse(compare(old, other, allow=True))} == {"y"}


def test_a_drafter_that_raises_now_is_worse() -> None:
    broken, whole = report({"x": 2.0}, error="no heads"), report({"x": 2.0})
    assert {what for _, what in worse(compare(whole, broken))} == {"drafter"}
    assert worse(compare(broken, whole)) == worse(compare(broken, broken)) == set()


def test_a_slower_arm_is_worse_and_the_same_one_is_not() -> None:
    old = report({"x": 2.0})
    assert "speed-up in tokens/s" in {what for _, what in worse(compare(old, report({"x": 1.5})))}
    assert worse(compare(old, old)) == set()


def test_runs_that_ended_by_what_they_saw_are_refused_unless_allowed() -> None:
    own = report({"x": 2.0})
    ended = own.model_copy(update={"provenance": own.provenance.model_copy(update={"extent": {"decided": [1]}})})
    for pair in ((own, ended), (ended, own)):
        with pytest.raises(ConfigError, match="was run until it was decided"):
            compare_reports(*pair, ("old", "new"), allow=False)
        found = compare_reports(*pair, ("old", "new"), allow=True)
        assert any("was run until it was decided" in line for line in found.differences)


def test_refusals_name_the_inner_key_that_differs() -> None:
    workload = EXPERIMENT["workload"] | {"per_category": 2}  # type: ignore[operator]
    with pytest.raises(ConfigError, match="not of one experiment") as error:
        compare_reports(
            report({"x": 2.0}),
            report({"x": 2.0}, experiment=EXPERIMENT | {"workload": workload}),
            ("a", "b"),
            allow=False,
        )
    assert "experiment.workload.per_category: absent / 2" in str(error.value)
    assert "{" not in str(error.value)


def test_a_drafter_that_drafts_less_at_the_same_rate_is_worse() -> None:
    old, new = report({"x": 2.0}, steps=(1.0, 2.0, 2.0), drafts=8), report({"x": 2.0}, drafts=2)
    found = {what.partition(" (")[0]: what for _, what in worse(compare(old, new))}
    assert "accepted length" in found
    assert "acceptance rate" not in found


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (("identical", 0), ("lossless", 1), "worse"),
        (("identical", 0), ("consistent", 1, 2), "undecided"),
        (("identical", 0), ("too few prompts", 2), "worse"),
        (("lossless", 1), ("LOSSY", 3), "worse"),
        (("lossless", 1), ("identical", 0), "better"),
        (("lossless", 1), ("too few prompts", 2), "undecided"),
        (("LOSSY", 3), ("lossless", 1), "better"),
    ],
)
def test_tokens_that_are_no_longer_plains_are_worse(
    before: tuple[str, int], after: tuple[str, int] | tuple[str, int, int], verdict: str
) -> None:
    found = compare(report({"x": 2.0}, equality=before), report({"x": 2.0}, equality=after))
    assert [change.verdict for change in found.changes if change.what == "equality"] == [verdict]


def test_a_report_is_the_same_as_itself() -> None:
    own = report({"x": 2.0})
    assert {change.verdict for change in compare(own, own).changes} == {"same"}
    assert "same" not in {
        change.verdict for change in compare(own, report({"x": 2.5})).changes if "speed" in change.what
    }


def test_reports_without_counts_of_drafts_by_position_can_be_compared() -> None:
    own = report({"x": 2.0})
    older = own.model_copy(update={"requests": own.requests.model_copy(update={"drafted_per_position": []})})
    assert worse(compare(older, own)) == set()


def test_contents_are_compared_and_not_where_they_lie() -> None:
    workload = {"data": "/b/set.jsonl", "limit": 8}
    moved = report(
        {"x": 2.0},
        model=MODEL | {"path": "/b/model"},
        workload=WORKLOAD | {"data": "/b/set.jsonl"},
        experiment=EXPERIMENT | {"workload": workload},
    )
    found = compare(report({"x": 2.0}), moved)
    assert any("/a/model / /b/model, of equal contents" in difference for difference in found.differences)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": MODEL | {"sampled_sha256": "z"}}, "model.sampled_sha256"),
        ({"model": MODEL | {"dtype": "bfloat16"}}, "model.dtype"),
        ({"workload": WORKLOAD | {"sha256": "z"}}, "workload.sha256"),
        ({"experiment": EXPERIMENT | {"workload": {"data": "/a/set.jsonl", "limit": 4}}}, "experiment.workload"),
    ],
)
def test_other_contents_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compare(report({"x": 2.0}), report({"x": 2.0}, **changes))


def test_labels_tell_fixed_lengths_from_those_that_adapt() -> None:
    arms = {"x": {"speculative.drafter.length": "adaptive"}, "y": {"speculative.drafter.length": "fixed"}, "ref": {}}
    found = [label_among(arms, arm, length) for arm, length in (("x", 4), ("y", 4), ("ref", None))]
    assert found == ["x<=4", "y@4", "ref"]


def test_comparing_loads_no_engine() -> None:
    code = (
        "import sys, dovetail.spec_decode.experiments.compare as compare; assert compare.compare_reports;"
        " assert not {'torch', 'dovetail.engine.engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
