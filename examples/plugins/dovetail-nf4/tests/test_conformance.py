"""The suite of quantization methods."""

from __future__ import annotations

from typing import ClassVar

import pytest
from dovetail_nf4.method import NF4Method

from dovetail.testing import QuantizationSuite


class TestNF4(QuantizationSuite):
    """With blocks of 64, as in the paper."""

    plugin = NF4Method
    # A product is off by 0.021 at most. Of errors that all weights share, which the suite tests for a quarter of the
    # tolerance, the table has some by itself: further out its numbers lie wider apart, where a normal distribution
    # falls, so that weights shrink by 0.66% when each is rounded to the nearest.
    tolerance = 0.028


@pytest.mark.slow
class TestSmallBlocks(QuantizationSuite):
    """With half as many weights to a constant, which are closer."""

    plugin = NF4Method
    options: ClassVar = {"block_size": 32}
    tolerance = 0.025
