"""Estimates of acceptance against drafts whose chances are known."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.spec_decode.lengths.acceptance_history import RequestAcceptance, shared_history

rounds = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=40)


@given(rounds, st.integers(0, 8))
def test_gains_of_a_chain_are_chances_that_never_rise(history: list[tuple[int, int]], length: int) -> None:
    request = RequestAcceptance(shared_history(), trees=False)
    for drafted, accepted in history:
        request.judged(drafted, range(min(drafted, accepted)))
    gains = request.gains(length)
    assert len(gains) == length
    assert all(0 <= later <= sooner <= 1 for sooner, later in itertools.pairwise(gains))


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_gains_come_near_the_truth(chance: float) -> None:
    draw, shared = random.Random(3), shared_history()
    totals = [0.0] * 4
    for _ in range(100):
        request = RequestAcceptance(shared, trees=False)
        for _ in range(20):
            stood = next((i for i in range(4) if draw.random() >= chance), 4)
            request.judged(4, range(stood))
        totals = [total + gain / 100 for total, gain in zip(totals, request.gains(4), strict=True)]
    assert totals == pytest.approx([chance, chance**2, chance**3, chance**4], abs=0.08)


def test_a_new_request_expects_what_others_saw() -> None:
    shared = shared_history()
    other = RequestAcceptance(shared, trees=False)
    fresh = RequestAcceptance(shared, trees=False)
    assert fresh.gains(1)[0] == pytest.approx(0.6)
    for _ in range(100):
        other.judged(3, [])
    assert fresh.gains(1)[0] < 0.05


def test_a_request_that_changes_its_nature_is_soon_believed() -> None:
    request = RequestAcceptance(shared_history(), trees=False)
    for _ in range(50):
        request.judged(4, [])
    before = request.gains(1)[0]
    for _ in range(8):
        request.judged(4, range(4))
    assert before < 0.1
    assert request.gains(1)[0] > 0.35


def test_nodes_of_a_tree_are_judged_each_by_itself() -> None:
    request = RequestAcceptance(shared_history(), trees=True)
    for _ in range(200):
        request.judged(3, [1])
    first, second, third = request.gains(3)
    assert (first < 0.1, second > 0.9, third < 0.2) == (True, True, True)


def test_a_drafter_that_offers_nothing_is_known_for_it() -> None:
    request = RequestAcceptance(shared_history(), trees=False)
    assert request.share_offered == 1.0
    for _ in range(40):
        request.offered(4, 0)
    assert request.share_offered < 0.05
