"""Experiments that end when they are decided: when a batch size needs no more groups, and what a report may say then.

Each group of prompts runs once: new prompts are what decides, and the same ones again say little. After each round the
speed-ups over the baseline in tokens/s are looked at, which is what `sequential` is for. A batch size ends when all of
its are decided; p-values are compared with equal parts (Bonferroni) of half of the 5%, over all arms, lengths and
batch sizes of the experiment, so that no verdict depends on what is measured later: corrections of reports are milder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dovetail.spec_decode.experiments.bootstrap import LEVEL, Estimate, Resampler
from dovetail.spec_decode.experiments.records import RequestRecord, by_variant
from dovetail.spec_decode.experiments.schema import CONTROL
from dovetail.spec_decode.experiments.sequential import always_valid, smallest_effect_at_any_look
from dovetail.spec_decode.experiments.speed import PLAIN, PRIMARY, VariantKey, log_ratios, values_by_turn

_SHARE = 0.5
"""Of the 5%, for tokens/s."""


class AlwaysValid(Resampler):
    """Means over groups whose intervals and p-values hold at whatever group an experiment ends."""

    def finest(self, alpha: float) -> Resampler:
        """This: nothing is drawn."""
        return self

    def smallest_effect(self, groups: int, alpha: float) -> float:
        """As in the base class, at whatever group it is decided."""
        return smallest_effect_at_any_look(groups, alpha)

    def mean(self, values: Sequence[float], null: float = 0.0, level: float = LEVEL) -> Estimate:
        """As in the base class. Values are in the order in which groups ended."""
        found = always_valid([value - null for value in values], level)
        low, high = (None if end is None else end + null for end in (found.low, found.high))
        return replace(found, value=found.value + null, low=low, high=high)


def is_decided(requests: Sequence[RequestRecord], comparisons: int, baseline: VariantKey = PLAIN) -> bool:
    """Whether all speed-ups in tokens/s at one batch size are decided.

    Args:
        requests: of that batch size, groups in the order in which they ran.
        comparisons: number of speed-ups that the whole experiment asks for.
    """
    found = {(arm, length): own for (_, arm, length), own in by_variant(requests).items()}
    if baseline not in found:
        return False
    base = values_by_turn(found[baseline], PRIMARY, None)
    judged = [own for key, own in found.items() if key != baseline and key[0] != CONTROL]
    logs = [list(log_ratios(base, values_by_turn(own, PRIMARY, None), is_rate=True).values()) for own in judged]
    return all(own and _p(own) < _SHARE * (1 - LEVEL) / comparisons for own in logs)


def _p(logs: Sequence[float]) -> float:
    found = always_valid(logs)
    return 1.0 if found.p is None else found.p
