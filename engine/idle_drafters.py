"""Requests that go without their drafter because it has not paid for long.

A drafter with layers of its own takes in every token of its requests, drafts or not, and the blocks that it fills are
told apart from others. So whether a request has one is decided when it comes, before its prefix is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

_ONE_IN, _ONE_IN_AT_LEAST = 16, 256
"""So many requests come for the first that has its idle drafter, to see whether it pays again; twice as many for each
one after that, but not more than these."""


@dataclass(slots=True)
class _Spacing:
    one_in: int = _ONE_IN
    came: int = 0
    """Requests since the last that had the drafter."""


class IdleDrafters:
    """Lets one in so many requests have theirs. What a request is answered does not hang on it: drafters whose draws
    would be seen in seeded or strict tokens do not draw where they adapt."""

    def __init__(self) -> None:
        self._spacings: dict[str, _Spacing] = {}
        """Of drafters that were idle when a request of theirs last came."""

    def drafter_for(self, asked: str | None, idle: frozenset[str]) -> str | None:
        """The drafter of a request that comes, which asks for `asked`, or by default has it. `idle`: as the last step
        told (`StepResult.idle_drafters`)."""
        if asked is None or asked not in idle:
            if asked is not None:
                self._spacings.pop(asked, None)
            return asked
        spacing = self._spacings.setdefault(asked, _Spacing())
        spacing.came += 1
        if spacing.came < spacing.one_in:
            return None
        self._spacings[asked] = _Spacing(min(2 * spacing.one_in, _ONE_IN_AT_LEAST))
        return asked
