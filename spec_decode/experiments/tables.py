"""What tables and sections of a report are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.spec_decode.experiments.bootstrap import Estimate


@dataclass(frozen=True)
class TableData:
    """A table. The last column may hold verdicts, which are coloured."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""


@dataclass(frozen=True)
class Section:
    """One part of the report."""

    title: str
    notes: Sequence[str]
    tables: Sequence[TableData]


def format_estimate(estimate: Estimate | None, form: str) -> str:
    """Value [low, high]."""
    if estimate is None or math.isnan(estimate.value):
        return "-"
    value = form.format(estimate.value)
    if estimate.low is None or estimate.high is None:
        return f"{value} [-]"
    return f"{value} [{form.format(estimate.low)}, {form.format(estimate.high)}]"
