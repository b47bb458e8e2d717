"""Turns of one conversation are alike, so that speed counts conversations and not turns."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dovetail.spec_decode.experiments.bootstrap import Array, Resampler
from dovetail.spec_decode.experiments.plan import make_groups
from dovetail.spec_decode.experiments.records import RequestRecord
from dovetail.spec_decode.experiments.schema import BASELINE
from dovetail.spec_decode.experiments.speed import PRIMARY, Speed, compare_speed
from dovetail.spec_decode.experiments.stopping import AlwaysValid, is_decided

RESAMPLER = Resampler(0)


def measured(gains: Array, batch: int = 1, plain: Array | None = None) -> list[RequestRecord]:
    """Requests of plain and of an arm, whose speeds' logarithms are `plain` (0 where it is None) and `gains`,
    [conversations, turns]."""
    count = len(gains)
    speeds = {BASELINE: np.zeros_like(gains) if plain is None else plain, "a": gains}
    conversations = [place % count for place in range(gains.size)]
    records = []
    for group, places in enumerate(make_groups(gains.size, batch, 0, conversations)):
        for arm in (BASELINE, "a"):
            for place in places:
                turn, first = divmod(place, count)
                last = math.exp(-speeds[arm][first, turn])
                key = arm, None, batch, 0, group, place
                times, begun_by = [last / 2, last], first if turn else None
                records.append(
                    RequestRecord(*key, "all", [1, 2], times, 0, 0, [], "", turn=turn, first_prompt=begun_by)
                )
    return records


def speed(records: list[RequestRecord], resampler: Resampler = RESAMPLER) -> Speed:
    return next(s for s in compare_speed(records, resampler).ratios if s.metric == PRIMARY)


@pytest.mark.parametrize("resampler", [RESAMPLER, AlwaysValid(0)])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_second_turn_that_brings_what_the_first_did_adds_nothing(resampler: Resampler, batch: int) -> None:
    gains = np.repeat(np.random.default_rng(1).normal(0.05, 0.1, (14, 1)), 2, axis=1)
    both, first = (speed(measured(own, batch), resampler).ratio for own in (gains, gains[:, :1]))
    assert both.groups == first.groups == 14 // batch
    assert (both.value, both.low, both.high) == pytest.approx((first.value, first.low, first.high))


def test_a_run_is_not_decided_by_turns_that_say_what_was_said() -> None:
    gains = np.repeat(np.random.default_rng(2).normal(0.1, 0.1, (8, 1)), 8, axis=1)
    assert not is_decided(measured(gains[:, :1]), 1)
    assert not is_decided(measured(gains), 1)
    assert is_decided(measured(np.random.default_rng(2).normal(0.1, 0.1, (64, 1))), 1)


@pytest.mark.nightly
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("correlation", [0.5, 0.8])
def test_intervals_of_alike_turns_hold_the_truth(correlation: float, batch: int) -> None:
    generator = np.random.default_rng(3)
    held = 0
    for _ in range(300):
        # Both arms draw from one distribution: the slower request ends a batch, so that 1 is the truth for no other.
        shared, own = generator.normal(size=(2, 16, 1)), generator.normal(size=(2, 16, 2))
        plain, gains = 0.1 * (math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own)
        found = speed(measured(gains, batch, plain)).unadjusted
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 1 <= found.high
    # Of 300 at 95%, fewer than 274 have a chance below 1%.
    assert held >= 274
