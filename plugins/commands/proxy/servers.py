"""Servers of one kind, and which of them is asked next."""

from __future__ import annotations

import time
from collections.abc import Sequence

RETRY_S = 5.0
"""How long a server that failed is asked only after the others."""


class Servers:
    """Asked in turns; those that failed lately come last."""

    def __init__(self, urls: Sequence[str]):
        """`urls`: base addresses, at least one."""
        self._urls = list(urls)
        self._next = 0
        self._failed_at: dict[str, float] = {}

    def in_turn(self) -> list[str]:
        """All of them, in the order in which one request tries them."""
        first = self._next % len(self._urls)
        self._next += 1
        urls = [*self._urls[first:], *self._urls[:first]]
        return sorted(urls, key=self._has_failed)

    def note_failure(self, url: str) -> None:
        """It did not answer as it should."""
        self._failed_at[url] = time.monotonic()

    def note_answer(self, url: str) -> None:
        """It answers."""
        self._failed_at.pop(url, None)

    def _has_failed(self, url: str) -> bool:
        return time.monotonic() - self._failed_at.get(url, -RETRY_S) < RETRY_S
