from __future__ import annotations

import numpy as np
import pytest

from dovetail.testing.acceptance_suite import SIGNIFICANCE, chi_square_p
from dovetail.worker.sampling.streams import ACCEPT, DRAFT, SAMPLE, seed_word, uniforms

N = 1 << 16

RECORDED = ["0x1.5b877d323870ap-2", "0x1.867fe5b2efbb8p-3", "0x1.a8b6547df4542p-1"]


def seeds(*values: int) -> np.ndarray:
    return np.array([seed_word(value) for value in values])


def along(axis: str) -> np.ndarray:
    """65,536 draws that differ in one argument only."""
    steps = np.arange(N)
    if axis == "seeds":
        return uniforms(steps.astype(np.uint64), SAMPLE, np.array([5]))
    if axis == "positions":
        return uniforms(seeds(5), SAMPLE, steps)
    return uniforms(seeds(5), ACCEPT, np.array([5]), steps)


@pytest.mark.parametrize("axis", ["seeds", "positions", "indices"])
def test_draws_are_uniform(axis: str) -> None:
    draws = along(axis)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.bincount((draws * 256).astype(np.int64), minlength=256)
    assert chi_square_p(counts, np.full(256, N / 256)) > SIGNIFICANCE
    # The low bits count as well: they decide between rare tokens.
    low = np.bincount((draws * 2.0**53).astype(np.int64) % 256, minlength=256)
    assert chi_square_p(low, np.full(256, N / 256)) > SIGNIFICANCE


@pytest.mark.parametrize("axis", ["seeds", "positions", "indices"])
@pytest.mark.parametrize("lag", [1, 2, 7, 64])
def test_neighbours_are_independent(axis: str, lag: int) -> None:
    draws = along(axis)
    cells = (draws[:-lag] * 16).astype(np.int64) * 16 + (draws[lag:] * 16).astype(np.int64)
    assert chi_square_p(np.bincount(cells, minlength=256), np.full(256, len(cells) / 256)) > SIGNIFICANCE


def test_streams_and_seeds_are_uncorrelated() -> None:
    steps = np.arange(N)
    columns = [uniforms(seeds(seed), stream, steps) for seed in (0, 1, 2**63) for stream in (SAMPLE, DRAFT, ACCEPT)]
    columns += [uniforms(seeds(0), ACCEPT, steps, index) for index in (1, 2)]
    correlations = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlations).max() < 4.5 / np.sqrt(N)


def test_a_draw_depends_on_its_own_arguments_only() -> None:
    random = np.random.default_rng(0)
    many = random.integers(0, 2**64, 50, dtype=np.uint64)
    positions = random.integers(0, 10**6, 50)
    together = uniforms(many, DRAFT, positions)
    assert [uniforms(many[i : i + 1], DRAFT, positions[i : i + 1])[0] for i in range(50)] == together.tolist()


def test_values_never_change() -> None:
    # Recorded once: a seed must give the same text in every version and on every machine.
    draws = uniforms(seeds(0, 1234, -1), SAMPLE, np.array([0, 17, 2**40]))
    assert [float(draw).hex() for draw in draws] == RECORDED


def test_few_draws_are_those_of_many() -> None:
    of = np.arange(40, dtype=np.uint64) * np.uint64(2**60 + 7)
    streams, positions, lanes = np.resize([SAMPLE, DRAFT, ACCEPT], 40), np.arange(40) * 999, np.arange(40)[::-1].copy()
    every = uniforms(of, streams, positions, lanes)
    few = [uniforms(of[i : i + 5], streams[i : i + 5], positions[i : i + 5], lanes[i : i + 5]) for i in range(0, 40, 5)]
    assert np.concatenate(few).tolist() == every.tolist()
