"""The choice of draft lengths against trying all of them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dovetail.spec_decode.lengths.goodput import choose_lengths

chances = st.floats(0.0, 1.0)
chains = st.lists(chances, max_size=4).map(lambda rates: np.cumprod(rates).tolist())
batches = st.lists(chains, min_size=1, max_size=4)


def rate(lengths: tuple[int, ...], gains: list[list[float]], num_tokens: float, seconds: np.ndarray) -> float:
    tokens = num_tokens + sum(sum(own[:length]) for own, length in zip(gains, lengths, strict=True))
    return float(tokens / seconds[sum(lengths)])


def costs(gains: list[list[float]], steps: list[float], base: float) -> np.ndarray:
    """Rising seconds for 0, 1, ... drafts, in stairs where some steps are 0."""
    count = sum(map(len, gains))
    return base + np.concatenate(([0.0], np.cumsum((steps * (count + 1))[:count])))


@given(batches, st.lists(st.floats(0.0, 2.0), min_size=1, max_size=6), st.floats(0.1, 5.0))
def test_the_best_of_all_choices_is_taken(gains: list[list[float]], steps: list[float], base: float) -> None:
    num_tokens, seconds = float(len(gains)), costs(gains, steps, base)
    lengths, factor = choose_lengths(gains, num_tokens, seconds)
    every = itertools.product(*(range(len(own) + 1) for own in gains))
    best = max(rate(choice, gains, num_tokens, seconds) for choice in every)
    found = rate(tuple(lengths), gains, num_tokens, seconds)
    assert np.isclose(found, best, rtol=1e-9)
    assert np.isclose(factor, found * seconds[0] / num_tokens, rtol=1e-9)


@given(st.lists(st.lists(chances, max_size=4), min_size=1, max_size=3), st.floats(0.01, 1.0))
def test_a_tree_never_does_worse_than_no_drafts(gains: list[list[float]], step: float) -> None:
    num_tokens, seconds = float(len(gains)), costs(gains, [step], 1.0)
    lengths, factor = choose_lengths(gains, num_tokens, seconds)
    assert all(0 <= length <= len(own) for length, own in zip(lengths, gains, strict=True))
    assert factor >= 1.0
    assert np.isclose(rate(tuple(lengths), gains, num_tokens, seconds), factor * num_tokens / seconds[0])


def test_free_verification_takes_every_draft_that_may_stand() -> None:
    assert choose_lengths([[0.9, 0.5], [0.1]], 2, np.ones(4))[0] == [2, 1]


def test_a_second_node_that_is_likelier_than_the_first_brings_the_first_with_it() -> None:
    assert choose_lengths([[0.1, 0.9]], 1, np.array([1.0, 1.3, 1.6]))[0] == [2]


def test_verification_that_costs_as_much_as_a_step_is_not_worth_a_doubt() -> None:
    assert choose_lengths([[0.95]], 1, np.array([1.0, 2.0])) == ([0], 1.0)


def test_a_gain_below_the_margin_is_left_alone() -> None:
    assert choose_lengths([[0.5]], 1, np.array([1.0, 1.49]))[0] == [1]
    assert choose_lengths([[0.5]], 1, np.array([1.0, 1.49]), margin=0.02)[0] == [0]
