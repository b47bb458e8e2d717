"""Acceptance, speed and cost from records that were made by hand."""

from __future__ import annotations

import math
import random

import pytest

from dovetail.spec_decode.experiments.acceptance import describe_acceptance
from dovetail.spec_decode.experiments.bootstrap import Resampler
from dovetail.spec_decode.experiments.cost import (
    Crossover,
    Line,
    describe_grid,
    describe_steps,
    fit_line,
    fit_models,
)
from dovetail.spec_decode.experiments.equality import Equality, control_batch, first_difference
from dovetail.spec_decode.experiments.fail_if import Condition
from dovetail.spec_decode.experiments.judging import Diverged, PValues, correct, judge, p_values
from dovetail.spec_decode.experiments.records import RequestRecord, StepRecord
from dovetail.spec_decode.experiments.result_sections import gain_end, predicted_end
from dovetail.spec_decode.experiments.results import ArmStatus, Row, result_names, result_rows
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.speed import compare_speed
from dovetail.spec_decode.experiments.warnings import memory_warnings, tie_warnings

RESAMPLER = Resampler(0, draws=1000)


def request(arm: str, length: int | None, group: int, repetition: int = 0, **changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "arm": arm,
        "length": length,
        "batch": 1,
        "repetition": repetition,
        "group": group,
        "prompt": group,
        "category": "all",
        "token_ids": [1, 2, 3, 4],
        "times": [1.0, 2.0, 3.0, 4.0],
        "drafted": 0,
        "accepted": 0,
        "accepted_per_position": [],
        "finish_reason": "length",
    }
    return RequestRecord(**values | changes)  # type: ignore[arg-type]


def step(arm: str, length: int | None, batch: int, **changes: object) -> StepRecord:
    values: dict[str, object] = {
        "arm": arm,
        "length": length,
        "batch": batch,
        "total": 10.0,
        "prepare": 1.0,
        "forward": 5.0,
        "sample": 1.0,
        "draft": 0.0,
        "prompt_tokens": 0,
        "tokens": batch,
        "drafted": 0,
        "accepted": 0,
        "running": batch,
        "kv_blocks": 3,
    }
    return StepRecord(**values | changes)  # type: ignore[arg-type]


def test_times_of_a_request() -> None:
    record = request("a", 4, 0, times=[0.5, 1.0, 1.0, 2.0])
    assert (record.ttft, record.e2e, record.itl) == (0.5, 2.0, 0.5)
    assert (record.decode_tokens, record.decode_steps) == (3, 2)
    assert request("a", 4, 0, times=[0.5], token_ids=[1]).itl is None


def test_ratio_of_sums_and_mean_over_requests_differ_as_defined() -> None:
    """One long request with a poor rate, one short with a good one."""
    records = [
        request("a", 4, 0, drafted=90, accepted=9, accepted_per_position=[6, 3], times=[1.0, 2.0, 3.0, 3.0]),
        request("a", 4, 1, drafted=10, accepted=9, accepted_per_position=[5, 4], times=[1.0, 2.0, 2.0, 2.0]),
    ]
    found = describe_acceptance(records)[0]
    assert found.rate is not None
    assert found.rate_of_requests is not None
    assert found.accepted_length is not None
    assert found.rate.value == pytest.approx(18 / 100)
    assert found.rate_of_requests.value == pytest.approx((0.1 + 0.9) / 2)
    assert found.accepted_length.value == pytest.approx(6 / 3)
    assert found.positions == pytest.approx([11 / 3, 7 / 3, 0, 0])
    assert found.wasted == pytest.approx(82 / 8)
    assert found.rate.low is None  # two prompts tell nothing of their spread


def test_lengths_and_positions_say_of_what_they_are_shares() -> None:
    """Four decode steps bring five tokens; two of them are rounds, of which one drafted two tokens and one three."""
    steps = [1.0, 2.0, 3.0, 4.0, 5.0, 5.0]
    record = request(
        "a",
        4,
        0,
        token_ids=list(range(6)),
        times=steps,
        drafted=5,
        accepted=1,
        accepted_per_position=[1, 0, 0],
        drafted_per_position=[2, 2, 1],
    )
    found = describe_acceptance([record])[0]
    assert found.rounds == 2
    assert found.accepted_length is not None
    assert found.round_length is not None
    assert found.accepted_length.value == pytest.approx(5 / 4)
    assert found.round_length.value == pytest.approx(3 / 2)
    assert found.positions == pytest.approx([1 / 4, 0, 0, 0])
    assert found.positions_of_rounds == pytest.approx([1 / 2, 0, 0, 0])
    assert found.positions_of_drafts == [0.5, 0.0, 0.0, None]


def test_arms_without_drafts_have_no_acceptance() -> None:
    assert describe_acceptance([request(BASELINE, None, 0)]) == []


def test_categories_add_up() -> None:
    records = [
        request("a", 2, i, category="xy"[i % 2], drafted=10, accepted=i, accepted_per_position=[i]) for i in range(8)
    ]
    overall, x, y = describe_acceptance(records)
    assert (overall.category, x.category, y.category) == (None, "x", "y")
    assert overall.accepted == x.accepted + y.accepted == 28


SLOW, QUICK = [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 2.0, 2.0]
"""Four tokens one by one; and three of them in one step."""


def cell(batch: int, repetition: int, accepted: int, times: list[float], groups: int = 6) -> list[RequestRecord]:
    return [
        request("a", 4, g, repetition, batch=batch, drafted=10, accepted=accepted, times=times) for g in range(groups)
    ]


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (cell(1, 1, 9, QUICK), "0.400 where prompts ran first, 0.900 where they ran again"),
        (cell(1, 0, 9, QUICK, groups=2), "ran again"),
        (cell(4, 0, 9, QUICK), "rises from 0.400 at batch 1 to 0.900"),
        (cell(1, 1, 4, SLOW), None),
        (cell(4, 0, 4, SLOW), None),
        (cell(4, 0, 9, SLOW), None),
    ],
    ids=["repetition", "filled group", "batch", "steady", "steady batch", "shorter drafts"],
)
def test_a_drafter_that_remembers_is_told(later: list[RequestRecord], words: str | None) -> None:
    found = list(memory_warnings([*cell(1, 0, 4, SLOW), *later]))
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def timed(factors: dict[str, float], noise: float, seed: int = 0) -> list[RequestRecord]:
    """Twenty prompts, two repetitions; arm a takes 1 / factors[a] of the time, give or take."""
    draw = random.Random(seed)
    records = []
    for arm, factor in factors.items():
        for group in range(20):
            for repetition in range(2):
                scale = (1 + group) / factor * math.exp(draw.gauss(0, noise))
                records.append(
                    request(
                        arm, None if "plain" in arm else 4, group, repetition, times=[scale * t for t in (1, 2, 3, 4)]
                    )
                )
    return records


def test_speed_is_paired_and_turned_so_that_more_is_better() -> None:
    speeds = compare_speed(timed({BASELINE: 1, CONTROL: 1, "fast": 1.5, "slow": 0.8}, 0.02), RESAMPLER).ratios
    found = {(s.metric, s.arm): s for s in speeds}
    for metric in ("tokens/s", "e2e", "itl", "ttft"):
        fast, slow, control = (found[metric, arm] for arm in ("fast", "slow", CONTROL))
        assert (fast.verdict, slow.verdict) == ("faster", "slower")
        assert fast.ratio.low is not None
        assert fast.ratio.high is not None
        assert fast.ratio.low < 1.5 < fast.ratio.high
        assert slow.ratio.value == pytest.approx(0.8, rel=0.02)
        assert control.ratio.value == pytest.approx(1, rel=0.02)


def test_noise_is_undecided_and_says_what_would_decide() -> None:
    speeds = compare_speed(timed({BASELINE: 1, CONTROL: 1, "same": 1.01}, 0.3), RESAMPLER).ratios
    found = next(s for s in speeds if s.metric == "tokens/s" and s.arm == "same")
    assert found.verdict == "undecided"
    assert found.groups_to_decide is not None
    assert found.groups_to_decide > 20
    assert found.detectable is not None
    assert found.detectable > 0.05


def test_too_few_groups_are_undecided_without_an_interval() -> None:
    records = [record for record in timed({BASELINE: 1, CONTROL: 1, "fast": 9}, 0.01) if record.group < 3]
    found = next(s for s in compare_speed(records, RESAMPLER).ratios if s.arm == "fast")
    assert (found.verdict, found.ratio.low, found.ratio.groups) == ("undecided", None, 3)


def test_a_line_is_found_through_noise_and_outliers() -> None:
    draw = random.Random(1)
    points = [(x, 3 + 0.5 * x + draw.gauss(0, 0.05)) for x in (1.0, 4.0, 8.0, 16.0) for _ in range(40)]
    points += [(1.0, 500.0), (16.0, 800.0)]
    line = fit_line(points)
    assert line.start == pytest.approx(3, abs=0.1)
    assert line.slope == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(4.0, 2.0)], Line(2.0, 0.0)),
        ([(1.0, 5.0), (2.0, 3.0)], Line(4.0, 0.0)),
        ([(1.0, 1.0), (2.0, 4.0)], Line(0.0, 1.8)),
    ],
)
def test_no_cost_is_negative_or_falls(points: list[tuple[float, float]], expected: Line) -> None:
    found = fit_line(points)
    assert (found.start, found.slope) == pytest.approx((expected.start, expected.slope))


def modelled_steps() -> list[StepRecord]:
    """Forward 4 + 1 r ms over r rows, rest 2 ms, drafting 0.5 b; three of four drafts stand."""
    steps = []
    for batch in (1, 2, 4):
        rows = batch * 5
        steps.append(step(BASELINE, None, batch, total=6.0 + batch, forward=4.0 + batch, prepare=1.0, sample=1.0))
        steps.append(
            step(
                "a",
                4,
                batch,
                total=6.0 + rows + 0.5 * batch,
                forward=4.0 + rows,
                draft=0.5 * batch,
                tokens=4 * batch,
                drafted=4 * batch,
                accepted=3 * batch,
            )
        )
    return steps


def test_the_cost_model_predicts_what_its_lines_say() -> None:
    records = [
        request("a", 4, g, drafted=8, accepted=6, times=[1.0, *[2.0] * 4, *[3.0] * 4], token_ids=list(range(9)))
        for g in range(6)
    ]
    model = fit_models(modelled_steps(), describe_acceptance(records))[0]
    assert model.accepted_length == pytest.approx(4)
    assert model.drafted_per_step == pytest.approx(4)
    for batch in (1, 2, 4, 32):
        expected = 4 * (6 + batch) / (6 + 5 * batch + 0.5 * batch)
        assert model.speedup(batch) == pytest.approx(expected)
    # 4 (6 + b) <= 6 + 5.5 b from b = 12 on.
    assert model.crossover() == 12


def ends(**changes: object) -> Crossover:
    values: dict[str, object] = {
        "measured": None,
        "not_shown": [],
        "without_interval": [],
        "predicted": None,
        "predicted_from": [1, 4],
    }
    return Crossover("a", 4, **values | changes)  # type: ignore[arg-type]


def test_one_batch_size_predicts_no_other() -> None:
    records = [request("a", 4, g, drafted=8, accepted=6) for g in range(6)]
    steps = [step for step in modelled_steps() if step.batch == 1]
    model = fit_models(steps, describe_acceptance(records))[0]
    assert (model.batches, model.crossover()) == ([1], None)
    assert predicted_end(ends(predicted_from=model.batches)) == "-"


@pytest.mark.parametrize(
    ("predicted", "text"),
    [
        (3, "batch 3"),
        (12, "batch 12 (extrapolated from 1, 4)"),
        (None, "none up to 1,024 (extrapolated from 1, 4)"),
    ],
)
def test_a_prediction_beyond_what_was_measured_says_so(predicted: int | None, text: str) -> None:
    assert predicted_end(ends(predicted=predicted)) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "beyond 8"),
        ({"not_shown": [1]}, "not shown at batch 1"),
        ({"not_shown": [4], "measured": 8}, "batch 8 (not shown at batch 4)"),
        ({"not_shown": [1], "without_interval": [8]}, "not shown at batch 1 (no interval: 8)"),
    ],
)
def test_a_gain_that_was_not_shown_has_no_measured_end(changes: dict[str, object], text: str) -> None:
    assert gain_end(ends(**changes), [1, 4, 8]) == text


def test_an_interval_around_1_is_no_end_of_the_gain() -> None:
    speeds = compare_speed(timed({BASELINE: 1, CONTROL: 1, "same": 1.01}, 0.3), RESAMPLER).ratios
    found = describe_grid(speeds, [])[1][0]
    assert (found.measured, found.not_shown) == (None, [1])


def test_the_grid_puts_measured_beside_predicted() -> None:
    records = timed({BASELINE: 1, CONTROL: 1, "a": 1.5}, 0.02)
    records = [r if r.arm != "a" else request("a", 4, r.group, r.repetition, times=r.times, drafted=4) for r in records]
    speeds = compare_speed(records, RESAMPLER).ratios
    models = fit_models(modelled_steps(), describe_acceptance(records))
    cells, crossovers = describe_grid(speeds, models)
    assert [(cell.arm, cell.length, cell.batch) for cell in cells] == [("a", 4, 1)]
    assert cells[0].predicted is not None
    assert crossovers[0].measured is None  # its interval lies above 1 at the only batch size
    assert gain_end(crossovers[0], [1]) == "beyond 1"


def test_a_gain_without_an_interval_has_no_end() -> None:
    speeds = compare_speed(measured(3), RESAMPLER).ratios
    assert gain_end(describe_grid(speeds, [])[1][0], [1]) == "no interval"
    records = [*measured(6, times=[2.0, 3.0, 4.0, 5.0]), *measured(3, batch=4)]
    found = describe_grid(compare_speed(records, RESAMPLER).ratios, [])[1][0]
    assert gain_end(found, [1, 4]) == "not shown at batch 1 (no interval: 4)"


def test_cost_per_step_leaves_prompts_out() -> None:
    steps = [
        step("a", 4, 2, tokens=5, accepted=3, drafted=8, draft=2.0),
        step("a", 4, 2, prompt_tokens=99, total=500.0),
    ]
    found = describe_steps(steps)[0]
    assert found.steps == 1
    assert (found.rows, found.wasted) == (10.0, 5.0)
    assert found.schedule == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("one", "other", "index"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [1], 0)],
)
def test_first_difference(one: list[int], other: list[int], index: int | None) -> None:
    assert first_difference(one, other) == index


def judged(own: Diverged, control: Diverged, tie_gap: float = 0.01) -> str:
    return judge(own, control, tie_gap, p_values(own, control))[0]


@pytest.mark.parametrize(
    ("own", "control", "verdict"),
    [
        ({1, 2}, set(), "LOSSY"),
        ({1}, {1}, "lossless"),
        ({1, 2}, {3, 4}, "consistent"),
        (set(range(21)), {20}, "LOSSY"),
        (set(range(4)), {0}, "too few prompts"),
        ({1, 2}, {9}, "too few prompts"),
        (set(range(6)), {0}, "LOSSY"),
        (set(range(6)), {6}, "not shown"),  # p = 0.0625
        (set(range(6)), {6, 7, 8, 9}, "consistent"),
    ],
)
def test_real_divergences_are_judged_beside_those_of_the_control(
    own: set[int], control: set[int], verdict: str
) -> None:
    found = [Diverged(frozenset(prompts), frozenset(prompts)) for prompts in (own, control)]
    assert judged(*found) == verdict


def ties(*prompts: int) -> Diverged:
    return Diverged(frozenset(), frozenset(prompts))


@pytest.mark.parametrize(
    ("own", "control", "tie_gap", "verdict"),
    [
        (ties(*range(7)), ties(), 0.78, "LOSSY"),
        (ties(*range(7)), ties(), 0.01, "LOSSY"),
        (ties(*range(4)), ties(), 0.78, "not shown"),
        (ties(*range(4)), ties(), 0.01, "lossless"),
        (ties(*range(14)), ties(*range(6, 20)), 0.78, "consistent"),
        (ties(1, 2), ties(1, 2, 3), 0.78, "lossless"),
        (ties(1, 2), ties(3), 0.78, "consistent"),
    ],
)
def test_ties_are_counted_beside_those_of_the_control(
    own: Diverged, control: Diverged, tie_gap: float, verdict: str
) -> None:
    assert judged(own, control, tie_gap) == verdict


def test_many_variants_make_one_p_value_count_for_less() -> None:
    own, control = ties(*range(5)), ties()
    alone = p_values(own, control)
    corrected = correct({0: alone, 1: PValues(1.0, 1.0), 2: PValues(1.0, 1.0)})[0]
    assert corrected.every == pytest.approx(3 / 32)
    assert judge(own, control, 0.5, alone)[0] == "LOSSY"
    assert judge(own, control, 0.5, corrected)[0] == "not shown"


@pytest.mark.parametrize(
    ("batch", "length", "largest", "found"),
    [(1, 4, 48, 5), (4, 3, 48, 16), (4, None, 48, 8), (16, 4, 48, 48), (8, 4, 8, 4), (1, 4, 1, 1)],
)
def test_the_control_has_as_many_rows_as_a_verify_step(
    batch: int, length: int | None, largest: int, found: int
) -> None:
    assert control_batch(batch, length, largest) == found


def equality_of(verdict: str, tie_gap: float | None = None) -> Equality:
    return Equality("a", 4, 1, 8, (), 0, None, verdict, "why", tie_gap)  # type: ignore[arg-type]


def test_a_wide_tie_gap_is_told() -> None:
    assert "tie_gap is 0.78" in next(iter(tie_warnings([equality_of("consistent", 0.78)])))
    assert not list(tie_warnings([equality_of("lossless", 0.15), equality_of("identical")]))


def rows_of(records: list[RequestRecord], verdict: str = "identical", status: tuple[ArmStatus, ...] = ()) -> list[Row]:
    equality = [equality_of(verdict)]
    speeds, acceptance = compare_speed(records, RESAMPLER).ratios, describe_acceptance(records)
    return result_rows(equality, speeds, acceptance, status, records)


def measured(groups: int, **changes: object) -> list[RequestRecord]:
    arms: list[tuple[str, int | None]] = [(BASELINE, None), (CONTROL, None), ("a", 4)]
    return [request(arm, length, group, **changes) for arm, length in arms for group in range(groups)]


def failures(text: str, rows: list[Row]) -> list[str]:
    return [failure.message for failure in Condition(text).failures(rows)]


def test_every_row_has_every_name() -> None:
    left_out = ArmStatus("gone", None, False, "no such drafter")
    for row in rows_of(measured(6), status=(left_out,)):
        assert sorted(row.values) == sorted(result_names())


def test_a_ratio_without_values_fails_a_condition() -> None:
    rows = rows_of(measured(6, token_ids=[1], times=[1.0]))
    assert "itl not measured: no request has seconds per token" in failures("itl < 1.0", rows)[0]
    assert failures("ttft < 0.9", rows) == []


def test_too_few_groups_fail_a_condition_that_needs_an_interval_and_say_so() -> None:
    rows = rows_of(measured(3))
    for text in ("speedup.low < 0.5", "not speedup.low >= 0.5"):
        assert failures(text, rows) == ["a@4, batch 1: speedup.low not measured: 3 groups, 5 needed"]


@pytest.mark.parametrize("verdict", ["too few prompts", "not shown"])
def test_what_was_not_shown_fails_a_condition(verdict: str) -> None:
    rows = rows_of(measured(6), verdict=verdict)
    assert failures("lossless == false", rows) == ["a@4, batch 1: lossless not measured: why"]
    assert failures("lossless == false", rows_of(measured(6))) == []


def test_an_arm_that_did_not_run_fails_unless_it_is_asked_about() -> None:
    status = (ArmStatus("gone", None, False, "no such drafter"),)
    rows = rows_of(measured(6), status=status)
    assert "the arm did not run (no such drafter)" in failures("lossless == false", rows)[0]
    assert failures("ran and lossless == false", rows) == []
    assert failures("arm == 'a' and lossless == false", rows) == []
    assert len(failures("length == 4 and lossless == false", rows)) == 1


def test_a_drafter_that_raised_can_be_asked_about() -> None:
    assert len(failures("drafter_error", rows_of(measured(6, drafter_error="no heads")))) == 1
    assert failures("drafter_error", rows_of(measured(6))) == []
