"""Student's t, for intervals over few groups."""

from __future__ import annotations

import math

_TABLED = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""97.5% quantiles for 1 to 30 degrees of freedom."""
_NORMAL = 1.959964


def t_quantile(freedom: float) -> float:
    """The 97.5% quantile of Student's t; a little more between the degrees of freedom that are tabled.

    Beyond 30 by two terms of Cornish and Fisher's expansion (Abramowitz and Stegun 1964, 26.7.5), right to 1e-4.
    """
    if freedom > len(_TABLED):
        first = (_NORMAL**3 + _NORMAL) / 4
        second = (5 * _NORMAL**5 + 16 * _NORMAL**3 + 3 * _NORMAL) / 96
        return _NORMAL + first / freedom + second / freedom**2
    return _TABLED[max(1, math.floor(freedom)) - 1]


__all__ = ["t_quantile"]
