"""Intervals, verdicts and corrections on synthetic data with known effects."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from dovetail.spec_decode.experiments.bootstrap import (
    MIN_GROUPS,
    Resampler,
    binomial_tail,
    groups_needed,
    holm,
    p_values,
    reaches,
    studentized,
)

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]

EXPERIMENTS = 2000
EFFECT = math.log(1.25)


def timings(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Log speed-ups around `EFFECT`: prompts differ, and timings have skewed noise that three repetitions average."""
    noise = generator.lognormal(-3.0, 0.8, (3, 2, *shape))
    spikes = (generator.random((3, 2, *shape)) < 0.03) * generator.exponential(0.3, (3, 2, *shape))
    times = 1 + noise + spikes
    return EFFECT + 0.1 * generator.normal(size=shape) + np.log(times[:, 0] / times[:, 1]).mean(axis=0)


def skewed(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """A few prompts gain much."""
    return EFFECT + 0.2 * (generator.exponential(size=shape) - 1)


def normal(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return EFFECT + 0.1 * generator.normal(size=shape)


def heavy(generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return EFFECT + 0.1 * generator.standard_t(3, size=shape)


def judged(values: np.ndarray, seed: int, draws: int = 2000) -> tuple[float, np.ndarray]:
    """Share of intervals that hold `EFFECT`, and p-values of it, of experiments [S, groups]."""
    weights = Resampler(seed, draws=draws).weights(values.shape[1])
    value, error, deviations = studentized(values, np.ones_like(values), weights)
    below, above = reaches(error, deviations)
    held = (value - below <= EFFECT) & (value + above >= EFFECT)
    return float(held.mean()), p_values(value - EFFECT, error, deviations)


def coverage(draw: Draw, groups: int, seed: int) -> float:
    return judged(draw(np.random.default_rng(seed), (EXPERIMENTS, groups)), seed)[0]


@pytest.mark.parametrize("groups", [24, 48])
@pytest.mark.parametrize("draw", [timings, normal, skewed])
def test_intervals_cover_what_they_claim(draw: Draw, groups: int) -> None:
    # 1.5 percent, and one standard error of 2,000 experiments.
    assert 0.93 <= coverage(draw, groups, seed=3) <= 0.97


@pytest.mark.parametrize("groups", [6, 8, 12])
@pytest.mark.parametrize("draw", [timings, normal, skewed, heavy])
def test_few_groups_make_intervals_wide_and_not_wrong(draw: Draw, groups: int) -> None:
    """docs/experiments.md, "The intervals"."""
    assert 0.94 <= coverage(draw, groups, seed=2) <= 0.99


def test_percentile_bootstrap_would_not() -> None:
    """The check can fail: the simpler method is too narrow at the same size."""
    generator = np.random.default_rng(3)
    values = normal(generator, (EXPERIMENTS, 8))
    drawn = values @ Resampler(3, draws=2000).weights(8) / 8
    low, high = np.quantile(drawn, [0.025, 0.975], axis=1)
    assert np.mean((low <= EFFECT) & (high >= EFFECT)) < 0.935


def test_ratio_of_sums_covers_over_requests_of_any_length() -> None:
    """Acceptance: requests draft 20 to 200 tokens, each with a rate of its own."""
    generator = np.random.default_rng(11)
    shape = (EXPERIMENTS, 32)
    drafted = generator.integers(20, 200, shape)
    rates = generator.beta(6, 4, shape)
    accepted = generator.binomial(drafted, rates)
    weights = Resampler(11, draws=2000).weights(shape[1])
    value, error, deviations = studentized(accepted.astype(float), drafted.astype(float), weights)
    below, above = reaches(error, deviations)
    assert 0.935 <= np.mean((value - below <= 0.6) & (value + above >= 0.6)) <= 0.965


@pytest.mark.parametrize("groups", [MIN_GROUPS, 6, 8, 12, 24])
@pytest.mark.parametrize("draw", [timings, normal, skewed])
def test_no_effect_is_decided_falsely_at_most_one_time_in_twenty(draw: Draw, groups: int) -> None:
    _, p = judged(draw(np.random.default_rng(7), (EXPERIMENTS, groups)), seed=7)
    assert np.mean(p < 0.05) <= 0.05 + 0.01  # two standard errors of 2,000 experiments


def test_of_five_arms_without_effect_none_is_decided_after_holm() -> None:
    generator = np.random.default_rng(7)
    count = EXPERIMENTS // 2
    p = np.array([judged(timings(generator, (count, 24)), seed=7, draws=4000)[1] for _ in range(5)])
    false = [min(holm(dict(enumerate(row))).values()) < 0.05 for row in p.T.tolist()]
    assert np.mean(false) <= 0.05 + 0.014  # two standard errors


def test_p_values_and_intervals_decide_alike() -> None:
    values = skewed(np.random.default_rng(1), (EXPERIMENTS, 8))
    held, p = judged(values, seed=1)
    assert np.mean(p >= 0.05) == held


def test_a_scalar_estimate_is_the_vectorised_one() -> None:
    values = [0.1, 0.3, 0.2, 0.5, 0.0, 0.4]
    resampler = Resampler(0, draws=500)
    found = resampler.mean(values, null=0.25)
    assert found.value == pytest.approx(0.25)
    assert found.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(6))
    assert found.p == pytest.approx(1.0)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.25 < found.high


def test_few_groups_have_no_interval() -> None:
    found = Resampler(0).mean([1.0] * (MIN_GROUPS - 1))
    assert (found.value, found.low, found.p) == (1.0, None, None)


@pytest.mark.parametrize(("value", "p"), [(0.0, 1.0), (0.1, 1 / 10_001)])
def test_groups_that_are_all_alike(value: float, p: float) -> None:
    found = Resampler(0).mean([value] * 8)
    assert found.low == found.high == pytest.approx(value)
    assert found.p == pytest.approx(p)


def test_a_ratio_needs_something_below() -> None:
    with pytest.raises(ValueError, match="sum to 0"):
        Resampler(0).ratio([0.0] * 6, [0.0] * 6)


def test_holm_by_hand() -> None:
    """Holm (1979): sorted p-values times m, m - 1, ..., never falling."""
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06}
    )


def test_sample_size_has_the_power_that_it_claims() -> None:
    effect, spread = 0.04, 0.1
    needed = groups_needed(effect, spread)
    assert needed is not None
    generator = np.random.default_rng(2)
    values = generator.normal(effect, spread, (EXPERIMENTS, needed))
    value, error, deviations = studentized(values, np.ones_like(values), Resampler(2, draws=1000).weights(needed))
    decided = p_values(value, error, deviations) < 0.05
    # The number comes from 400 simulated experiments.
    assert 0.74 <= decided.mean() <= 0.86


def test_no_effect_needs_no_number() -> None:
    assert groups_needed(0.0, 0.1) is None


def test_binomial_tail_by_hand() -> None:
    assert binomial_tail(3, 3) == 1 / 8
    assert binomial_tail(0, 5) == 1
    assert binomial_tail(4, 5) == 6 / 32
