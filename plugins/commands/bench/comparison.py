"""Two sets of metrics side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["faster", "slower", "undecided"]


@dataclass(frozen=True)
class Row:
    """One metric of both results."""

    name: str
    unit: str
    statistic: str
    a: float
    b: float
    ratio: float | None
    """b / a; None where a is 0."""
    interval: tuple[float, float] | None
    """95%."""
    verdict: Verdict
    """On b: "faster" is better, whatever the metric's direction."""
    slowdown: float | None
    """How much worse b is, 0.05 for 5%; negative where it is better."""


@dataclass(frozen=True)
class Comparison:
    """Two results side by side."""

    a_name: str
    b_name: str
    rows: Sequence[Row]
    notes: Sequence[str]
    warnings: Sequence[str]

    def slower_than(self, limit: float) -> list[Row]:
        """Rows that are slower for certain, and by more than `limit` (0.05 for 5%)."""
        return [
            row for row in self.rows if row.verdict == "slower" and row.slowdown is not None and row.slowdown > limit
        ]

    def as_data(self) -> dict[str, Any]:
        """Returns the comparison as plain data."""
        return {"dovetail_bench_comparison": 1, **asdict(self)}
