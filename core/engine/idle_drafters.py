"""Requests that go without their drafter because it has not paid for long.

A drafter with layers of its own takes in every token of its requests, drafts or not, and the blocks that it fills are
told apart from others. So whether a request has one is decided when it comes, before its prefix is looked up.
"""

from __future__ import annotations

from collections import Counter

from dovetail.contracts.sampling import SamplingParams

_ONE_IN = 16
"""So many requests come for each that has its idle drafter, to see whether it pays again."""


class IdleDrafters:
    """`strict`: no token may depend on the clock."""

    def __init__(self, *, strict: bool):
        self._strict = strict
        self._came: Counter[str] = Counter()
        """Requests that came while their drafter was idle."""

    def drafter_for(self, asked: str | None, sampling: SamplingParams, idle: frozenset[str]) -> str | None:
        """The drafter of a request that comes, which asks for `asked`, or by default has it. `idle`: as the last step
        told (`StepResult.idle_drafters`)."""
        if asked is None or asked not in idle:
            return asked
        # Other drafts, other draws: a seed promises the same ones.
        if not sampling.is_greedy and (self._strict or sampling.seed is not None):
            return asked
        self._came[asked] += 1
        return asked if self._came[asked] % _ONE_IN == 0 else None
