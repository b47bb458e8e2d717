"""The verdict on greedy tokens, from prompts that diverge: an arm's compared with those of the baseline from itself.

Two tests, each McNemar's exact one over prompts. That over **REAL** divergences sees tokens that no rounding explains.
That over **all** of them sees what a wide tie gap hides: a target that computes something slightly else parts from the
baseline at near ties, as rounding does, but more often.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dovetail.spec_decode.experiments.bootstrap import binomial_tail, holm

Verdict = Literal[
    "identical", "lossless", "LOSSY", "lossy by declaration", "consistent", "not shown", "too few prompts"
]

SIGNIFICANT = 0.05
LOSSY_BELOW = 0.001
"""A p-value that makes a sampled run LOSSY: what is shown to be a bug had better be one."""
_DOUBTFUL = 0.25
"""What diverges more often than the control with a p below this is neither LOSSY for certain nor shown to be sound."""
WIDE_TIE_GAP = 0.15
"""Above it being a tie is no evidence by itself: the target prefers one token to the other by a sixth or more."""


@dataclass(frozen=True)
class Diverged:
    """Prompts whose tokens are not the baseline's."""

    real: frozenset[int]
    every: frozenset[int]
    """Ties as well."""


@dataclass(frozen=True)
class PValues:
    """That a variant's prompts diverge no more often than the control's; one-sided."""

    real: float
    every: float


def p_values(own: Diverged, control: Diverged) -> PValues:
    """McNemar, exact: of prompts that diverge in one of the two alone, so many in the variant."""
    return PValues(_mcnemar(own.real, control.real), _mcnemar(own.every, control.every))


def _mcnemar(own: frozenset[int], control: frozenset[int]) -> float:
    return binomial_tail(len(own - control), len(own ^ control))


def correct(found: Mapping[int, PValues]) -> dict[int, PValues]:
    """Holm's correction within each of the two tests."""
    real = holm({key: p.real for key, p in found.items()})
    every = holm({key: p.every for key, p in found.items()})
    return {key: PValues(real[key], every[key]) for key in found}


def judge(own: Diverged, control: Diverged, tie_gap: float, corrected: PValues) -> tuple[Verdict, str]:
    """Verdict and reason of a variant that diverges, compared with a control; `corrected` are the tests' p-values after
    correction for all variants."""
    counts = f"{len(own.every)} prompts diverge, {len(control.every)} of plain from itself"
    if own.real and (not control.real or corrected.real < SIGNIFICANT):
        return "LOSSY", f"{len(own.real)} divergences that no rounding explains"
    if corrected.every < SIGNIFICANT:
        return "LOSSY", f"{counts}: more than rounding does, ties or not"
    if not own.real and tie_gap <= WIDE_TIE_GAP:
        return "lossless", "at ties of the target only"
    differing = len(own.real ^ control.real)
    if len(own.real) > len(control.real) and binomial_tail(differing, differing) >= SIGNIFICANT:
        return "too few prompts", f"{len(own.real)} REAL, control {len(control.real)}: too few for any test to tell"
    raw = p_values(own, control)
    if raw.real < _DOUBTFUL:
        return "not shown", f"{len(own.real)} REAL, control {len(control.real)}: more, but not for certain"
    if raw.every < _DOUBTFUL:
        return "not shown", f"{counts}: more, but not for certain"
    if own.every <= control.every:
        return "lossless", "only where plain differs from itself"
    return "consistent", f"{counts}: no more by the test"
