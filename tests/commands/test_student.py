"""Student's t, against its density."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dovetail.commands.student import t_quantile


def inside(quantile: float, freedom: float) -> float:
    """The share of Student's t between -quantile and quantile: the density, integrated by trapezoids."""
    points = np.linspace(-quantile, quantile, 20001)
    log_scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    density = np.exp(log_scale - (freedom + 1) / 2 * np.log1p(points**2 / freedom))
    return float(((density[1:] + density[:-1]) / 2).sum() * (points[1] - points[0]))


@pytest.mark.parametrize("freedom", [*range(1, 31), 31, 35, 47, 100, 1000, 10**6])
def test_the_quantile_leaves_five_percent_outside(freedom: int) -> None:
    assert inside(t_quantile(freedom), freedom) == pytest.approx(0.95, abs=1e-4)


@pytest.mark.parametrize("freedom", [1.5, 4.7, 29.9, 30.5, 80.25])
def test_between_whole_degrees_of_freedom_it_errs_to_the_wide_side(freedom: float) -> None:
    assert 0.95 - 1e-5 <= inside(t_quantile(freedom), freedom) <= 0.984
