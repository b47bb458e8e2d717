"""What is said before an experiment runs: minutes, and the smallest effect."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dovetail.spec_decode.experiments.bootstrap import (
    Resampler,
    groups_needed,
    p_values,
    simulate_effect,
    smallest_effect,
    studentized,
)
from dovetail.spec_decode.experiments.families import Judged, first_alpha, judge_together
from dovetail.spec_decode.experiments.sequential import Looks, smallest_effect_at_any_look
from dovetail.spec_decode.experiments.simulated_effects import EFFECTS
from dovetail.spec_decode.experiments.stopping import AlwaysValid


@pytest.mark.parametrize(("groups", "comparisons"), [(12, 1), (12, 5), (24, 10)])
def test_the_smallest_effect_is_decided_four_times_out_of_five(groups: int, comparisons: int) -> None:
    alpha = first_alpha(comparisons)
    effect = smallest_effect(groups, alpha)
    values = np.random.default_rng(99).normal(effect, 1.0, (600, groups))
    weights = Resampler(5).finest(alpha).weights(groups)
    value, error, deviations = studentized(values, np.ones_like(values), weights)
    decided = p_values(value, error, deviations) < alpha
    # The effect comes from 200 simulated experiments, so it is right to 4 times their standard error of 2.8%.
    assert decided.mean() == pytest.approx(0.8, abs=0.11)


def test_too_few_groups_show_nothing() -> None:
    assert math.isinf(smallest_effect(4, 0.05))
    assert smallest_effect(6, 0.025) > smallest_effect(24, 0.025) > smallest_effect(96, 0.025)


@pytest.mark.parametrize("comparisons", [1, 8])
def test_so_many_looks_decide_the_smallest_effect_four_times_out_of_five(comparisons: int) -> None:
    alpha = first_alpha(comparisons)
    effect = smallest_effect_at_any_look(24, alpha)
    values = np.random.default_rng(98).normal(effect, 1.0, (600, 24))
    decided = Looks.at_every_group(values).log_evidence().max(axis=1) > -math.log(alpha)
    assert decided.mean() == pytest.approx(0.8, abs=0.08)


@pytest.mark.parametrize("resampler", [Resampler(0), AlwaysValid(0)])
def test_a_report_says_what_the_plan_says(resampler: Resampler) -> None:
    """As one of four ratios in tokens/s, of sixteen groups."""
    values = np.random.default_rng(1).normal(0, 0.1, 16)

    def judged() -> dict[int, Judged]:
        questions = {i: lambda level: resampler.mean(values.tolist(), level=level) for i in range(4)}
        return judge_together(questions, dict.fromkeys(range(4), "x") | {3: "y"}, "x", resampler.smallest_effect)

    decision = judged()[0].decision
    spread = float(values.std(ddof=1))
    alpha = first_alpha(3)
    assert decision.detectable == pytest.approx(math.expm1(resampler.smallest_effect(16, alpha) * spread))
    needed = groups_needed(float(values.mean()), spread, alpha, resampler.smallest_effect)
    assert decision.groups_to_decide is not None
    assert needed is not None
    assert resampler.smallest_effect(needed, alpha) * spread <= abs(values.mean())
    # Tested at least as readily once others are decided or have nothing to test.
    assert 16 < decision.groups_to_decide <= needed


def test_between_simulated_numbers_of_groups_the_effect_falls() -> None:
    found = [smallest_effect(groups, 0.01) for groups in range(5, 60)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("groups", "halves"),
    [
        pytest.param(groups, halves, marks=() if (groups, halves) == (8, 1) else pytest.mark.nightly)
        for groups, known in EFFECTS.items()
        for halves in range(len(known))
    ],
)
def test_effects_that_are_known_are_those_that_simulating_gives(groups: int, halves: int) -> None:
    assert EFFECTS[groups][halves] == pytest.approx(simulate_effect(groups, halves), rel=1e-5)
