"""Verdicts that are shown together: no more false ones than promised, and intervals that agree with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.bootstrap import LEVEL, Estimate, Resampler, step_down
from dovetail.spec_decode.experiments.families import judge_together
from dovetail.spec_decode.experiments.plan import make_groups, make_turns
from dovetail.spec_decode.experiments.records import RequestRecord
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL
from dovetail.spec_decode.experiments.speed import (
    PAIRS,
    PLAIN,
    PRIMARY,
    Compared,
    VariantKey,
    compare_speed,
    variant_named,
)
from dovetail.spec_decode.experiments.speed_section import speed_section

VARIANTS: list[VariantKey] = [PLAIN, (CONTROL, None), ("a", 2), ("a", 4), ("b", 2), ("b", 4), ("c", 4)]
"""Those of the example that `dovetail ab init` writes."""
CATEGORIES, PER_CATEGORY, TOKENS = 6, 4, 16


def plain_report(generator: np.random.Generator, speeds: dict[str, float] | None = None) -> list[RequestRecord]:
    """The example's experiment; `speeds`: by which factor arms are faster than plain, 1 where it is left out.

    Prompts differ by half, the machine's speed drifts, and each turn has noise with outliers of its own.
    """
    records = []
    prompts = CATEGORIES * PER_CATEGORY
    level = generator.normal(0, 0.5, prompts)
    for batch in (1, 4):
        groups = make_groups(prompts, batch, seed=0)
        drift = 0.0
        for turn in make_turns(VARIANTS, groups, 2, "abba", seed=batch):
            drift = 0.9 * drift + generator.normal(0, 0.02)
            factor = math.exp(drift + generator.normal(0, 0.05)) * (1 + 0.5 * (generator.random() < 0.03))
            factor /= (speeds or {}).get(turn.what[0], 1.0)
            for prompt in turn.prompts:
                first = 0.2 * math.exp(generator.normal(0, 0.05))
                times = factor * math.exp(level[prompt]) * (first + 0.1 * np.arange(TOKENS))
                place = turn.what[0], turn.what[1], batch, turn.repetition, turn.group, prompt
                category = f"category {prompt % CATEGORIES}"
                records.append(RequestRecord(*place, category, range(TOKENS), times.tolist(), 0, 0, [], "length"))
    return records


def has_verdict(compared: Compared) -> bool:
    """Whether a word of a verdict is anywhere in what is shown."""
    section = speed_section(compared, lambda arm, length: f"{arm}@{length}")
    return any(cell in ("faster", "slower") for table in section.tables for row in table.rows for cell in row)


def false_reports(count: int) -> int:
    """How many of so many reports of plain against plain have a verdict."""
    generator = np.random.default_rng(4)
    resampler = Resampler(0)
    return sum(has_verdict(compare_speed(plain_report(generator), resampler)) for _ in range(count))


def test_plain_against_plain_has_a_verdict_in_few_reports() -> None:
    # Of 3 at 5%, more than 1 have a chance below 1%.
    assert false_reports(3) <= 1


@pytest.mark.nightly
def test_plain_against_plain_has_a_verdict_in_one_report_of_twenty_at_most() -> None:
    # Of 40 at 5%, more than 6 have a chance of 0.3%.
    assert false_reports(40) <= 6


def test_an_arm_that_is_faster_is_so_against_every_other() -> None:
    compared = compare_speed(plain_report(np.random.default_rng(1), {"b": 1.4}), Resampler(0))
    decided = {(s.arm, s.metric) for s in compared.ratios if s.verdict == "faster" and s.batch == 1}
    assert decided >= {("b", PRIMARY), ("b", "itl"), ("b", "ttft")}
    assert {arm for arm, _ in decided} == {"b"}
    pairs = {frozenset((pair.arm, pair.other_arm)) for pair in compared.pairs if pair.verdict != "undecided"}
    assert pairs >= {frozenset("ab"), frozenset("bc")}
    assert frozenset("ac") not in pairs


def test_the_control_and_categories_are_not_judged() -> None:
    compared = compare_speed(plain_report(np.random.default_rng(2), {CONTROL: 3.0, "a": 3.0}), Resampler(0))
    assert {s.verdict for s in compared.ratios if s.arm == CONTROL or s.category is not None} == {"not judged"}


def test_one_by_one_end_to_end_is_tokens_per_second_and_is_shown_once() -> None:
    compared = compare_speed(plain_report(np.random.default_rng(3)), Resampler(0))
    found = {(s.metric, s.arm, s.length): s for s in compared.ratios if s.batch == 1 and s.category is None}
    assert found["e2e", "a", 2].ratio == found[PRIMARY, "a", 2].ratio
    tables = {table.title: table for table in speed_section(compared, lambda arm, length: arm).tables}
    assert {row[1] for row in tables["e2e"].rows} == {"4"}
    assert {row[1] for row in tables[PRIMARY].rows} == {"1", "4"}


@pytest.mark.parametrize("baseline", [PLAIN, ("a", 4), ("c", 4)])
def test_any_arm_can_be_what_others_are_compared_with(baseline: VariantKey) -> None:
    """Against the ratio of ratios to plain: log ratios of one group add up."""
    records = plain_report(np.random.default_rng(5), {"a": 1.3, "c": 0.8})
    by_one = compare_speed(records, Resampler(0)).ratios[: len(VARIANTS) - 1]
    to_plain = {(s.arm, s.length): s.ratio.value for s in by_one}
    compared = compare_speed(records, Resampler(0), baseline)
    found = {(s.arm, s.length): s for s in compared.ratios if s.metric == PRIMARY and s.batch == 1}
    assert baseline not in found
    assert set(found) == set(VARIANTS) - {baseline}
    for key, speed in found.items():
        against = 1.0 if key[0] == CONTROL else to_plain.get(baseline, 1.0)
        assert speed.ratio.value == pytest.approx(to_plain.get(key, 1.0) / against)
    assert baseline not in {(pair.arm, pair.length) for pair in compared.pairs}
    assert (PLAIN in {(pair.other_arm, pair.other_length) for pair in compared.pairs}) == (baseline != PLAIN)


def test_a_baseline_is_named_by_its_arm_or_its_label() -> None:
    labels = {PLAIN: BASELINE, ("a", 2): "a@2", ("a", 4): "a@4", ("c", 4): "c<=4"}
    assert [variant_named(name, labels) for name in ("plain", "a@4", "c")] == [PLAIN, ("a", 4), ("c", 4)]
    with pytest.raises(ConfigError, match="a@2, a@4"):
        variant_named("a", labels)
    with pytest.raises(ConfigError, match="plain"):
        variant_named("plian", labels)


def from_values(values: list[float], draws: int = 400) -> Callable[[float], Estimate]:
    return partial(_ask, Resampler(1, draws), values)


def _ask(resampler: Resampler, values: list[float], level: float) -> Estimate:
    return resampler.mean(values, level=level)


groups_of = st.integers(3, 9).flatmap(
    lambda count: st.tuples(st.floats(-0.5, 0.5), st.lists(st.floats(-0.3, 0.3), min_size=count, max_size=count))
)


@settings(max_examples=60)
@given(st.lists(groups_of, min_size=1, max_size=6), st.data())
def test_an_interval_leaves_1_out_if_and_only_if_there_is_a_verdict(
    experiments: list[tuple[float, list[float]]], data: st.DataObject
) -> None:
    questions = {i: from_values([effect + value for value in values]) for i, (effect, values) in enumerate(experiments)}
    groups = {index: data.draw(st.sampled_from([PRIMARY, "itl", PAIRS])) for index in questions}
    for index, judged in judge_together(questions, groups, PRIMARY).items():
        ratio, verdict, p = judged.ratio, judged.decision.verdict, judged.decision.adjusted_p
        if len(experiments[index][1]) < 5:
            assert (verdict, ratio.low, p) == ("undecided", None, None)
            continue
        assert ratio.low is not None
        assert ratio.high is not None
        assert judged.unadjusted.low is not None
        assert judged.unadjusted.high is not None
        assert ratio.low <= judged.unadjusted.low <= ratio.value <= judged.unadjusted.high <= ratio.high
        # Of groups that are all alike an effect of 1e-100 is certain, and no double apart from 1.
        if abs(ratio.value - 1) < 1e-12:
            continue
        assert (ratio.low > 1) == (verdict == "faster")
        assert (ratio.high < 1) == (verdict == "slower")
        assert p is not None
        assert (p < 1 - LEVEL) == (verdict != "undecided")


p_values = st.dictionaries(st.integers(0, 30), st.tuples(st.floats(1e-6, 1), st.floats(0.01, 10)), min_size=1)


@given(p_values)
def test_the_levels_of_the_steps_decide_as_the_adjusted_p_values_do(found: dict[int, tuple[float, float]]) -> None:
    steps = step_down({k: p for k, (p, _) in found.items()}, {k: weight for k, (_, weight) in found.items()})
    for key, (p, _) in found.items():
        if abs(steps[key].p - (1 - LEVEL)) > 1e-9:
            assert (p < steps[key].alpha) == (steps[key].p < 1 - LEVEL)
        assert p <= steps[key].p
        assert steps[key].alpha <= 1 - LEVEL + 1e-12


@given(p_values)
def test_holm_rejects_what_the_closure_of_weighted_bonferroni_rejects(found: dict[int, tuple[float, float]]) -> None:
    """By brute force over all sets of at most six hypotheses: one is rejected if in every set that holds it some
    p is below its weight's share of 5%."""
    kept = dict(list(found.items())[:6])
    steps = step_down({k: p for k, (p, _) in kept.items()}, {k: weight for k, (_, weight) in kept.items()})
    for key in kept:
        others = [other for other in kept if other != key]
        rejected = True
        for chosen in range(2 ** len(others)):
            members = [key, *(other for place, other in enumerate(others) if chosen >> place & 1)]
            total = math.fsum(kept[member][1] for member in members)
            rejected &= any(kept[m][0] * total < (1 - LEVEL) * kept[m][1] for m in members)
        if abs(steps[key].p - (1 - LEVEL)) > 1e-9:
            assert (steps[key].p < 1 - LEVEL) == rejected
