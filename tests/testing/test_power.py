"""What the statistical checks of the suites find, and how often they are wrong: as their docstrings say."""

from __future__ import annotations

import numpy as np

from dovetail.testing.acceptance_suite import CELLS, NUM_ROUNDS, SIGNIFICANCE, chi_square_p
from dovetail.testing.draft_suite import DRAWS

TRIALS = 2000


def shares_found(probabilities: np.ndarray, moved: np.ndarray, num_draws: int) -> float:
    """How often draws from `moved` are found not to come from `probabilities`."""
    draws = np.random.default_rng(0).multinomial(num_draws, moved, TRIALS)
    return float(np.mean([chi_square_p(counts, probabilities * num_draws) < SIGNIFICANCE for counts in draws]))


def test_a_shift_of_a_first_token_is_found() -> None:
    """Fifteen outcomes, as in the acceptance suite; 0.035 moves from one to another."""
    probabilities = np.array([0.5, 0.3, *[0.2 / 13] * 13])
    moved = probabilities + 0.035 * (np.arange(15) == 1) - 0.035 * (np.arange(15) == 0)
    assert shares_found(probabilities, moved, NUM_ROUNDS) > 0.985
    assert shares_found(probabilities, probabilities, NUM_ROUNDS) < 3 * SIGNIFICANCE


def test_drawn_nodes_that_lean_to_one_side_are_found() -> None:
    """0.11 of probability moves from one half of the cells to the other."""
    cells = CELLS * CELLS
    uniform = np.full(cells, 1 / cells)
    leaning = uniform + np.where(np.arange(cells) < cells / 2, 0.11, -0.11) / (cells / 2)
    assert shares_found(uniform, leaning, DRAWS) > 0.985
    assert shares_found(uniform, uniform, DRAWS) < 3 * SIGNIFICANCE
