"""Evidence against an acceptance rule that claims to keep the target's distribution, from its tokens one by one.

Before each token is chosen, the target's distribution p there is known, and so is what was drafted for that place. For
any function f fixed beforehand, f(token) - sum of p f has the expectation 0 if the token comes from p. So the sums are
a martingale, whatever draft lengths, batches, preemption or other requests do. Two functions are watched:

- f is 1 for tokens that the draft's distribution q overrates (q > p; of a draft that was not drawn: the draft itself),
  0 for others. Of all sets of tokens this one gains most where some of q leaks into what should be p: a rule that
  accepts too readily.
- f is p itself, over its largest value: text that is likelier or less likely than it should be, bonus tokens included.

A gambler bets shares of a capital of 1 on either side of each function. Capital that grows is evidence: with a true
martingale, the probability that it ever reaches 1 / alpha is at most alpha (Ville 1939; Shafer 2021, "Testing by
betting"), after any number of tokens, so one may stop when one likes. No approximation for large numbers is involved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
_BETS = np.array([sign * share for share in _SHARES for sign in (1.0, -1.0)])
"""Of the capital, on the one side or the other. The gambler splits the capital between them at the start, so what
comes is the mean over all."""
_NORMAL_95 = 1.645
"""The normal quantile of nineteen times out of twenty."""


@dataclass(frozen=True)
class Observed:
    """What came of one token, and what was expected."""

    overrated: float
    """1 where the draft overrates the token, else 0; NaN where nothing was drafted for the place."""
    expected_overrated: float
    """The target's probability of all overrated tokens; NaN likewise."""
    likely: float
    """The token's probability in the target, over that of the likeliest token."""
    expected_likely: float


COLUMNS = 4


def observe(target: Array, overrated: NDArray[np.bool_] | None, token: int) -> Observed:
    """What the choice of `token` says.

    Args:
        target: [vocab_size], the probabilities that the token should come from.
        overrated: bool [vocab_size]; None where nothing was drafted for the place.
    """
    top = float(target.max())
    came = expected = math.nan
    if overrated is not None:
        came, expected = float(overrated[token]), float(target[overrated].sum())
    return Observed(came, expected, float(target[token]) / top, float(target @ target) / top)


@dataclass(frozen=True)
class Evidence:
    """What a number of tokens say about a rule."""

    places: int
    """Tokens for whose place something was drafted."""
    came: float
    """How many of them the draft overrates."""
    expected: float
    """How many these should be, by the target."""
    p: float
    """At most so likely is evidence like this, whenever one stops, for a rule that keeps the target's distribution."""
    spread: float
    """Standard deviation of `came` about `expected`."""

    @property
    def excess(self) -> float | None:
        """`came` / `expected`: above 1 for a rule that accepts too readily. None where none is expected."""
        return self.came / self.expected if self.expected else None

    def detectable(self, alpha: float) -> float:
        """The excess, less 1, that shows at `alpha` nineteen times out of twenty. Normal approximation."""
        if not self.expected:
            return math.inf
        # The best bet gains half the squared distance, the nearest one at least five sixths of that; others share the
        # capital.
        needed = math.sqrt(2.4 * math.log(2 * len(_BETS) / alpha)) + _NORMAL_95
        return needed * self.spread / self.expected


def weigh(rows: NDArray[Any]) -> Evidence:
    """The evidence of tokens: float64 [N, 4], the fields of `Observed` in order."""
    came, expected, likely, expected_likely = np.asarray(rows, np.float64).reshape(-1, COLUMNS).T
    drafted = ~np.isnan(came)
    came, expected = came[drafted], expected[drafted]
    logs = np.concatenate([_capital(came - expected), _capital(likely - expected_likely)])
    highest = float(logs.max())
    capital = highest + math.log(float(np.exp(logs - highest).mean()))
    spread = math.sqrt(float((expected * (1 - expected)).clip(0).sum()))
    return Evidence(int(drafted.sum()), float(came.sum()), float(expected.sum()), math.exp(-max(0.0, capital)), spread)


def _capital(differences: Array) -> Array:
    """Logarithm of what each bet makes of a capital of 1: [bets]. Differences are at least -1 and at most 1."""
    # In parts, so that memory does not grow with bets x tokens.
    total = np.zeros(len(_BETS))
    for start in range(0, len(differences), 1 << 16):
        total += np.log1p(_BETS[:, None] * differences[None, start : start + (1 << 16)]).sum(axis=1)
    return total
