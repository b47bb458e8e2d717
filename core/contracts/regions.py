"""Regions of an engine's memory: the weights, the KV cache, and the weights of each drafter. A region is resident,
asleep or invalid. An engine generates while its weights and its KV cache are resident."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

WEIGHTS: Final = "weights"
"""The target's weights."""
KV_CACHE: Final = "kv_cache"
"""The pages of keys and values, those of drafters included."""
DRAFTER_PREFIX: Final = "drafter:"
"""The region of a drafter's own weights is called this and the drafter's label."""


class RegionState(StrEnum):
    """Where the content of a region is."""

    RESIDENT = "resident"
    """In its memory, whole."""
    ASLEEP = "asleep"
    """Its memory is given back; the content is set aside, or lost."""
    INVALID = "invalid"
    """It has its memory, and its content is not whole: it awaits an update, or one failed. It generates nothing."""


@dataclass(frozen=True, kw_only=True)
class RegionStatus:
    """One region. It travels between processes, so everything in it is plain data."""

    name: str
    """`WEIGHTS`, `KV_CACHE`, or `DRAFTER_PREFIX` and a drafter's label. The tags of `sleep` and `wake_up` are these."""
    state: RegionState
    level: int = 0
    """While it is asleep: the level of its sleep."""
    reason: str = ""
    """While it is invalid: why."""


def drafter_region(label: str) -> str:
    """Returns the name of the region of a drafter's weights."""
    return DRAFTER_PREFIX + label


def drafter_label(region: str) -> str | None:
    """Returns the label of the drafter whose weights are this region; None for another region."""
    return region.removeprefix(DRAFTER_PREFIX) if region.startswith(DRAFTER_PREFIX) else None
