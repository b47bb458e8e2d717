"""`import dovetail` offers its names without importing what is behind them."""

from __future__ import annotations

import pytest

import dovetail


def test_all_is_sorted_and_complete():
    assert dovetail.__all__ == sorted(dovetail.__all__)
    assert set(dovetail.__all__) <= set(dir(dovetail))


def test_every_public_name_resolves():
    assert all(getattr(dovetail, name) is not None for name in dovetail.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'LLMM'"):
        dovetail.LLMM  # noqa: B018
