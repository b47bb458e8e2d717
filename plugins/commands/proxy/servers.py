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
        self._silent_until: dict[str, float] = {}

    def in_turn(self) -> list[str]:
        """All of them, in the order in which one request tries them."""
        first = self._next % len(self._urls)
        self._next += 1
        urls = [*self._urls[first:], *self._urls[:first]]
        return sorted(urls, key=self._has_failed)

    def that_answer(self) -> list[str]:
        """As `in_turn`, without those that took too long lately; may be empty."""
        now = time.monotonic()
        return [url for url in self.in_turn() if self._silent_until.get(url, now) <= now]

    def note_failure(self, url: str) -> None:
        """It did not answer as it should."""
        self._failed_at[url] = time.monotonic()

    def note_silence(self, url: str, for_s: float) -> None:
        """It took too long, and is not worth waiting for in the next `for_s` seconds."""
        self.note_failure(url)
        self._silent_until[url] = time.monotonic() + for_s

    def note_answer(self, url: str) -> None:
        """It answers."""
        self._failed_at.pop(url, None)

    def _has_failed(self, url: str) -> bool:
        return time.monotonic() - self._failed_at.get(url, -RETRY_S) < RETRY_S
