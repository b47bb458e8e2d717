"""Requests that go without their drafter because it has not paid for long.

A drafter with layers of its own takes in every token of its requests, drafts or not, and the blocks that it fills are
told apart from others. So whether a request has one is decided when it comes, before its prefix is looked up.
"""

from __future__ import annotations

from collections import Counter

_ONE_IN = 16
"""So many requests come for each that has its idle drafter, to see whether it pays again."""


class IdleDrafters:
    """Lets one in so many requests have theirs. What a request is answered does not hang on it: drafters whose draws
    would be seen in seeded or strict tokens do not draw where they adapt."""

    def __init__(self) -> None:
        self._came: Counter[str] = Counter()
        """Requests that came while their drafter was idle."""

    def drafter_for(self, asked: str | None, idle: frozenset[str]) -> str | None:
        """The drafter of a request that comes, which asks for `asked`, or by default has it. `idle`: as the last step
        told (`StepResult.idle_drafters`)."""
        if asked is None or asked not in idle:
            return asked
        self._came[asked] += 1
        return asked if self._came[asked] % _ONE_IN == 0 else None
