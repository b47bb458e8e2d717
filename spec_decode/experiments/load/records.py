"""What an open-loop load measured: one record per request, and one per segment that finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL

LoadKey = tuple[str, str, int | None]
"""Point, arm, draft length."""


@dataclass(frozen=True, slots=True)
class LoadRecord:
    """One request. Times are seconds; those without another origin count from its arrival."""

    point: str
    rate: float
    """Requests per second that arrive at this point."""
    arm: str
    length: int | None
    repetition: int
    segment: int
    prompt: int
    """Index of the prompt in the data set."""
    arrival: float
    """From the start of its segment."""
    queued: float
    """Until it was scheduled for the first time."""
    ttft: float
    e2e: float
    tokens: int
    drafted: int
    accepted: int
    drafter_error: str | None = None

    @property
    def itl(self) -> float | None:
        """Mean seconds per token after the first; None for a single token."""
        return (self.e2e - self.ttft) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def finished(self) -> float:
        """From the start of its segment."""
        return self.arrival + self.e2e


SegmentKey = tuple[str, int, int, str, int | None]
"""Point, repetition, segment, arm, draft length."""


@dataclass(frozen=True)
class FinishedSegment:
    """One segment in one arm, as it went."""

    point: str
    repetition: int
    segment: int
    arm: str
    length: int | None
    requests: Sequence[LoadRecord] = ()
    failure: str | None = None
    """Why there are no requests."""

    @property
    def key(self) -> SegmentKey:
        """What distinguishes it in its experiment."""
        return (self.point, self.repetition, self.segment, self.arm, self.length)


def by_load_key(records: Sequence[LoadRecord]) -> Mapping[LoadKey, list[LoadRecord]]:
    """Records by point, arm and length: points in the order in which they ran, the baseline and its control first."""
    found: dict[LoadKey, list[LoadRecord]] = {}
    for record in records:
        found.setdefault((record.point, record.arm, record.length), []).append(record)
    points = list(dict.fromkeys(key[0] for key in found))
    places = {BASELINE: 0, CONTROL: 1}
    return dict(sorted(found.items(), key=lambda item: (points.index(item[0][0]), places.get(item[0][1], 2))))
