"""What is learned of costs, from synthetic machines whose costs are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from dovetail.spec_decode.lengths.step_costs import CostCurve, DraftCosts, ReadingCosts, StepCosts

Machine = Callable[[int, int], float]
"""(requests, rows) -> seconds"""


def weights_bound(num_requests: int, num_rows: int) -> float:
    """Flat until arithmetic outweighs reading the weights, then linear; drafts cost a little by being there."""
    return max(0.010, 0.0012 * num_rows) + (0.0004 if num_rows > num_requests else 0.0)


def in_stairs(num_requests: int, num_rows: int) -> float:
    """Rows are computed by fours."""
    return 0.004 + 0.003 * -(-num_rows // 4)


def learned(machine: Machine, steps: list[tuple[int, int]], noise: Callable[[], float] = lambda: 1.0) -> StepCosts:
    costs = StepCosts()
    for num_requests, num_rows in steps:
        costs.observe(num_requests, num_rows, machine(num_requests, num_rows) * noise())
    return costs


@pytest.mark.parametrize("machine", [weights_bound, in_stairs])
@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_measured_steps_are_known(machine: Machine, num_requests: int) -> None:
    steps = [(num_requests, num_requests + drafts) for drafts in range(9)] * 5
    found = learned(machine, steps).step(num_requests, 8)
    true = np.array([machine(num_requests, num_requests + drafts) for drafts in range(9)])
    # Above 16 rows neighbours share a point.
    np.testing.assert_allclose(found, true, rtol=1e-6 if num_requests < 8 else 0.15)


def test_disturbances_do_not_count() -> None:
    draw = random.Random(1)
    steps = [(1, rows) for _ in range(60) for rows in (1, 3, 5)]
    costs = learned(weights_bound, steps, lambda: 8.0 if draw.random() < 0.15 else draw.uniform(0.97, 1.03))
    found, true = costs.step(1, 4), weights_bound(1, 5) / weights_bound(1, 1)
    assert found[4] / found[0] == pytest.approx(true, rel=0.08)


def test_a_machine_that_slows_down_makes_old_measurements_slower_too() -> None:
    costs = learned(weights_bound, [(1, 1), (1, 5)] * 10)
    for _ in range(12):
        costs.observe(1, 5, 3 * weights_bound(1, 5))
    found = costs.step(1, 4)
    assert found[0] == pytest.approx(3 * weights_bound(1, 1), rel=0.2)


def test_what_lasts_is_no_drift() -> None:
    draw = random.Random(5)
    costs = learned(weights_bound, [(1, 1), (1, 5)] * 5)
    for _ in range(2000):
        costs.observe(1, 5, weights_bound(1, 5) * draw.gauss(1, 0.05))
    assert costs.step(1, 0)[0] == pytest.approx(weights_bound(1, 1), rel=0.05)


def test_lines_join_what_was_measured() -> None:
    costs = learned(lambda requests, rows: 1.0 + rows, [(2, 2), (2, 10)] * 2)
    np.testing.assert_allclose(costs.step(2, 8), 1.0 + np.arange(2, 11))


def test_what_was_never_measured_is_thought_cheap_enough_to_try() -> None:
    costs = learned(lambda requests, rows: float(rows), [(4, 4)])
    found = costs.step(4, 16)
    assert found[0] == 4
    assert (np.diff(found) > 0).all()
    assert found[16] < 20


def test_an_empty_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        CostCurve().at(1)


def test_a_draft_costs_by_its_length_and_its_requests() -> None:
    costs = DraftCosts()
    assert costs.call(3, 5) == 0.0
    for length in (0, 2, 4):
        costs.observe(4, length, 0.001 * (1 + length))
    assert costs.call(4, 3) == pytest.approx(0.004)
    assert costs.call(8, 4) == pytest.approx(0.010)
    assert costs.call(2, 4) == pytest.approx(0.005)


def test_a_call_without_drafts_is_not_guessed_from_those_with_drafts() -> None:
    costs = DraftCosts()
    costs.observe(4, 1, 0.004)
    assert costs.call(4, 0) == 0.0
    costs.observe(4, 0, 0.001)
    assert costs.call(4, 0) == pytest.approx(0.001)


def test_reading_costs_by_the_position() -> None:
    reading = ReadingCosts()
    assert reading.seconds(100) == 0.0
    reading.observe(200, 0.1)
    reading.observe(1, 5.0)  # of one position nothing can be told
    assert reading.seconds(100) == pytest.approx(0.05)
