"""The suite of attention backends."""

from __future__ import annotations

from typing import ClassVar

import pytest
from dovetail_column_pages.backend import ColumnPages

from dovetail.testing import AttentionBackendSuite


class TestColumnPages(AttentionBackendSuite):
    plugin = ColumnPages


@pytest.mark.slow
class TestOneCallForEachRequest(AttentionBackendSuite):
    """Where no two requests fit into what is gathered at a time."""

    plugin = ColumnPages
    options: ClassVar = {"gather_kib": 1}
