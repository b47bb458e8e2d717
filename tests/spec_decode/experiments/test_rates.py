"""Intervals of acceptance on simulated pairs of drafter and target, whose true rate is known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.spec_decode.experiments.bootstrap import MIN_GROUPS, Resampler
from dovetail.spec_decode.experiments.rates import affine, count_per, mean_share, share, within

EXPERIMENTS = 3000
NUM_DRAFTS = 4


@dataclass(frozen=True)
class Pair:
    """How a drafter's tokens are accepted."""

    rate: float
    """Of one token, where those before it are accepted: the mean over prompts."""
    likeness: float
    """How alike prompts are: a + b of the Beta distribution of their rates."""
    rounds: float
    """Mean number of each prompt."""

    def draw(self, experiments: int, prompts: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Accepted and drafted tokens [experiments, prompts]: what is behind a rejected token is rejected."""
        generator = np.random.default_rng(seed)
        alike = self.rate * self.likeness, (1 - self.rate) * self.likeness
        rates = generator.beta(*alike, (experiments, prompts))
        rounds = generator.poisson(self.rounds, (experiments, prompts)) + 1
        accepted, alive = np.zeros_like(rounds), rounds
        for _ in range(NUM_DRAFTS):
            alive = generator.binomial(alive, rates)
            accepted = accepted + alive
        return accepted, NUM_DRAFTS * rounds

    @property
    def true_rate(self) -> float:
        """Of all drafted tokens: sum over j of E[p ** j], by the moments of the Beta distribution."""
        a, b = self.rate * self.likeness, (1 - self.rate) * self.likeness
        moments = np.cumprod([(a + j) / (a + b + j) for j in range(NUM_DRAFTS)])
        return float(moments.mean())


PAIRS = {
    "weak": Pair(0.1, 100, 20),
    "middle": Pair(0.5, 4, 25),
    "strong": Pair(0.9, 15, 25),
    "strong and short": Pair(0.9, 15, 8),
    "very strong": Pair(0.97, 30, 15),
}


@pytest.mark.parametrize("prompts", [5, 8, 12, 24])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_an_interval_holds_the_truth_so_often_and_has_no_impossible_end(pair: Pair, prompts: int) -> None:
    accepted, drafted = pair.draw(EXPERIMENTS, prompts, seed=prompts)
    held = 0
    for parts, wholes in zip(accepted, drafted, strict=True):
        found = share(parts.tolist(), wholes.tolist())
        assert found.low is not None
        assert found.high is not None
        assert 0 <= found.low <= found.value <= found.high <= 1
        held += found.low <= pair.true_rate <= found.high
    # Two standard errors of the simulation wide of 93% to 97%.
    assert 0.922 <= held / EXPERIMENTS <= 0.978


@given(
    st.lists(
        st.integers(0, 50).flatmap(lambda whole: st.tuples(st.integers(0, whole), st.just(whole))),
        min_size=1,
        max_size=12,
    ).filter(lambda pairs: any(whole for _, whole in pairs))
)
def test_no_interval_goes_beyond_what_can_be(pairs: list[tuple[int, int]]) -> None:
    parts, wholes = zip(*pairs, strict=True)
    found = share(parts, wholes)
    assert found.value == pytest.approx(sum(parts) / sum(wholes))
    drafting = sum(whole > 0 for whole in wholes)
    assert found.groups == drafting
    assert found.has_interval == (drafting >= MIN_GROUPS)
    if found.low is not None and found.high is not None:
        assert 0 <= found.low <= found.value <= found.high <= 1


def test_a_rate_of_all_or_of_none_is_uncertain_by_the_number_of_trials() -> None:
    none, all_of_few, all_of_many = share([0] * 6, [20] * 6), share([20] * 6, [20] * 6), share([200] * 6, [200] * 6)
    assert (none.low, none.value) == (0, 0)
    assert none.high is not None
    # The rule of three is 3 / 120; Student's t of six prompts goes further.
    assert 0.01 < none.high < 0.1
    assert all_of_few.low == pytest.approx(1 - none.high)
    assert all_of_many.low is not None
    assert all_of_few.low is not None
    assert all_of_few.low < all_of_many.low < 1


def test_counts_have_no_upper_bound() -> None:
    found = count_per([9, 12, 20, 3, 15], [4, 4, 4, 4, 4])
    assert found.value == pytest.approx(59 / 20)
    assert found.low is not None
    assert found.high is not None
    assert 0 < found.low < found.value < found.high
    nothing = count_per([0] * 5, [10] * 5)
    assert nothing.low == 0
    assert nothing.high is not None
    assert math.isfinite(nothing.high)


def test_a_mean_of_shares_counts_prompts_alike() -> None:
    found = mean_share([1.0, 0.0, 0.5, 0.5, 0.75], trials=100)
    assert found.value == pytest.approx(0.55)
    assert found.groups == 5
    assert found.has_interval


def test_a_length_is_a_share_of_the_longest() -> None:
    found = affine(share([10, 12, 15, 9, 20], [40] * 5), factor=4, offset=1.0)
    assert found.value == pytest.approx(1 + 4 * 66 / 200)
    assert found.low is not None
    assert found.high is not None
    assert 1 <= found.low < found.value < found.high <= 5


def test_a_part_that_is_more_than_its_whole_is_an_error() -> None:
    with pytest.raises(ValueError, match="more than its whole"):
        share([3.0], [2.0])


def test_a_difference_of_shares_is_at_most_one() -> None:
    found = Resampler(0).mean([1.0, 1.0, 1.0, 1.0, -1.0])
    assert found.low is not None
    assert found.low < -1, "the bootstrap knows no bounds"
    assert found.high is not None
    bounded = within(found, -1.0, 2 * found.high)
    assert (bounded.low, bounded.high) == (-1.0, found.high)
    assert bounded.value == found.value


def test_an_interval_that_spans_all_that_can_be_is_none() -> None:
    found = Resampler(0).mean([1.0, 1.0, 1.0, 1.0, -1.0])
    bounded = within(found, -1.0, 1.0)
    assert (bounded.low, bounded.high) == (None, None)
    assert bounded.value == found.value
