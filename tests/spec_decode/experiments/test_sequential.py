"""Intervals and p-values that may be looked at after every group, on simulated experiments."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dovetail.spec_decode.experiments.bootstrap import MIN_GROUPS, groups_needed, holm
from dovetail.spec_decode.experiments.sequential import Looks, always_valid

EXPERIMENTS, GROUPS = 4000, 200
ALPHA = 0.05
TWO_ERRORS = 2 * math.sqrt(ALPHA * (1 - ALPHA) / EXPERIMENTS)

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def normal(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return generator.normal(size=shape)


def heavy(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return generator.standard_t(3, size=shape)


def exponential(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return generator.exponential(size=shape) - 1


def autoregressive(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """A machine whose speed is an AR(1) process over turns; the ratio of two arms that run in abba order."""
    speed = np.zeros((shape[0], 2 * shape[1]))
    speed[:, 0] = generator.normal(size=shape[0]) / 0.6
    for turn in range(1, speed.shape[1]):
        speed[:, turn] = 0.8 * speed[:, turn - 1] + generator.normal(size=shape[0])
    differences = speed[:, 0::2] - speed[:, 1::2]
    differences[:, 1::2] *= -1
    return differences


@pytest.mark.parametrize("draw", [normal, heavy, exponential, autoregressive])
def test_no_effect_is_decided_at_any_look_in_one_of_twenty_experiments_at_most(draw: Draw) -> None:
    values = draw(np.random.default_rng(5), (EXPERIMENTS, GROUPS))
    decided = Looks.at_every_group(values).log_evidence().max(axis=1) > -math.log(ALPHA)
    assert decided.mean() <= ALPHA + TWO_ERRORS


def test_an_interval_for_a_fixed_number_of_groups_would_not_do() -> None:
    """The check can fail: Student's t, looked at as often."""
    looks = Looks.at_every_group(normal(np.random.default_rng(5), (EXPERIMENTS, GROUPS)))
    t = np.sqrt(looks.count) * looks.mean / np.where(looks.deviation > 0, looks.deviation, 1)
    assert (np.abs(t[:, MIN_GROUPS - 1 :]) > 2.78).any(axis=1).mean() > 0.15


@pytest.mark.parametrize("effect", [0.3, 0.5])
def test_half_of_the_experiments_are_decided_with_about_as_many_groups_as_a_fixed_number_takes(effect: float) -> None:
    fixed = groups_needed(effect, 1.0)
    assert fixed is not None
    values = effect + normal(np.random.default_rng(6), (EXPERIMENTS, GROUPS))
    decided = Looks.at_every_group(values).log_evidence() > -math.log(ALPHA)
    assert decided[:, : math.ceil(1.15 * fixed)].any(axis=1).mean() >= 0.5
    assert decided[:, : math.ceil(2 * fixed)].any(axis=1).mean() >= 0.8


def test_of_five_arms_none_is_decided_at_any_look_after_holm() -> None:
    """Arms share what plain took, so their p-values are not independent."""
    generator = np.random.default_rng(8)
    shape = (EXPERIMENTS, GROUPS)
    plain = normal(generator, shape)
    evidence = [Looks.at_every_group(normal(generator, shape) - plain).log_evidence().max(axis=1) for _ in range(5)]
    p = np.exp(-np.maximum(np.array(evidence), 0)).T
    false = [min(holm(dict(enumerate(row))).values()) < ALPHA for row in p.tolist()]
    assert np.mean(false) <= ALPHA + TWO_ERRORS


def test_the_evidence_is_the_bayes_factor_by_its_integral() -> None:
    """Rouder et al. (2009), equation 1 with a normal prior: noncentral likelihoods of the data, sigma integrated out
    under its scale-invariant prior, numerically. Values are mirrored, so that they have no skewness."""
    values = np.array([0.3, 1.1, 0.7, -0.1, 0.9, 1.5, 0.5])
    values = np.concatenate([values, 2 * values.mean() - values])
    found = float(Looks.at_every_group(values[None]).log_evidence()[0, -1])
    effects = np.linspace(-4, 6, 2001)[:, None]
    logs = np.linspace(-4, 4, 2001)[None]
    sigma = np.exp(logs)
    squares = sum((value / sigma - effects) ** 2 for value in values)
    likelihood = np.exp(-squares / 2 - len(values) * logs).sum(axis=1)
    at_zero = np.exp(-sum((value / sigma) ** 2 for value in values) / 2 - len(values) * logs).sum()
    prior = np.exp(-(effects[:, 0] ** 2) / 0.6) / math.sqrt(0.6 * math.pi)
    expected = float((likelihood * prior).sum() * 0.005 / at_zero)
    assert found == pytest.approx(math.log(expected), abs=1e-3)


@given(
    st.lists(st.floats(-2, 3, allow_subnormal=False).map(lambda value: round(value, 3)), min_size=1, max_size=40),
    st.sampled_from([0.95, 0.99, 0.8]),
)
def test_the_interval_leaves_0_out_if_and_only_if_p_says_so(values: list[float], level: float) -> None:
    found = always_valid(values, level)
    assert found.value == pytest.approx(sum(values) / len(values))
    assert (found.p is None) == (len(values) < MIN_GROUPS)
    if found.p is None:
        return
    assume(abs(found.p / (1 - level) - 1) > 1e-6)
    excludes = found.low is not None and found.high is not None and not found.low <= 0 <= found.high
    assert excludes == (found.p < 1 - level)


def test_more_looks_never_widen_an_interval() -> None:
    values = (0.2 + 0.1 * normal(np.random.default_rng(1), (1, 60))[0]).tolist()
    found = [always_valid(values[:count]) for count in range(12, 61)]
    widths = [one.high - one.low for one in found if one.high is not None and one.low is not None]
    assert len(widths) == len(found)
    assert all(later <= earlier for earlier, later in pairwise(widths))
    assert found[-1].low is not None
    assert found[-1].low > 0


def test_a_mean_that_drifts_away_is_judged_by_the_last_look() -> None:
    values = [1.0 + 0.01 * (index % 3) for index in range(20)] + [-1.0 + 0.01 * (index % 3) for index in range(60)]
    found = always_valid(values)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize(("value", "excludes"), [(0.0, False), (0.1, True)])
def test_groups_that_are_all_alike(value: float, excludes: bool) -> None:
    found = always_valid([value] * 12)
    assert found.low == found.high == pytest.approx(value)
    assert found.p is not None
    assert (found.p < ALPHA) == excludes


def test_nothing_is_no_mean() -> None:
    with pytest.raises(ValueError, match="no groups"):
        always_valid([])
