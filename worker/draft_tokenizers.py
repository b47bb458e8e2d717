"""The tokenizers that drafters are handed. Light on purpose: a driver pickles it with the worker's spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DraftTokenizers:
    """In the JSON form of the `tokenizers` library, as far as some drafter wants them."""

    target: str | None = None
    own: Mapping[str, str | None] = field(default_factory=dict)
    """By drafter, that of its own model."""
