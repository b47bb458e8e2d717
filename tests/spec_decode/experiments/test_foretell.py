"""What is said before an experiment runs: minutes, and the smallest effect."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dovetail.spec_decode.experiments.bootstrap import Resampler, p_values, studentized
from dovetail.spec_decode.experiments.families import first_alpha
from dovetail.spec_decode.experiments.foretell import smallest_effect


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
