"""How often drafts stood, by position: what tells how many are worth verifying.

Every request has a short memory of its own, since text changes its nature; all requests of a drafter share a longer
one, which stands in where a request has seen little.
"""

from __future__ import annotations

from collections.abc import Sequence

_HOPE = 0.6
"""Assumed chance of the first draft before anything was verified; twice a fair coin's trust goes with it."""
_HOPE_WEIGHT = 2.0
_SHARED_WEIGHT = 4.0
"""Rounds of its own after which a request trusts them as much as the others'."""
_REQUEST_MEMORY, _DRAFTER_MEMORY = 0.9, 0.99
"""What is left of an observation's weight a round later."""


class AcceptanceHistory:
    """Decaying counts, by position, of drafts that were judged and of those that stood.

    In a chain, position j is judged only where all before it stood, so its rate is conditional; in a tree every node is
    judged, and the rate of a node is that of standing at all.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._judged: list[float] = []
        self._stood: list[float] = []

    def add_chain(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens the first `accepted` stood."""
        judged = min(accepted + 1, drafted)
        self._decay(judged)
        for position in range(judged):
            self._judged[position] += 1
            self._stood[position] += position < accepted

    def add_tree(self, drafted: int, nodes: Sequence[int]) -> None:
        """Of `drafted` nodes those of `nodes` stood."""
        self._decay(drafted)
        for node in range(drafted):
            self._judged[node] += 1
        for node in nodes:
            self._stood[node] += 1

    def rate(self, position: int, expected: float, weight: float) -> float:
        """Share that stood, where `expected` counts as much as `weight` observations."""
        if position >= len(self._judged):
            return expected
        return (self._stood[position] + weight * expected) / (self._judged[position] + weight)

    def _decay(self, length: int) -> None:
        self._judged = [count * self._memory for count in self._judged]
        self._stood = [count * self._memory for count in self._stood]
        missing = length - len(self._judged)
        if missing > 0:
            self._judged += [0.0] * missing
            self._stood += [0.0] * missing


class RequestAcceptance:
    """One request's history over that of all requests of its drafter."""

    def __init__(self, shared: AcceptanceHistory, *, trees: bool) -> None:
        self._shared = shared
        self._own = AcceptanceHistory(_REQUEST_MEMORY)
        self._trees = trees
        self._offered = 1.0
        """Share of the drafts asked for that the drafter gave: what it does not offer costs nothing to verify."""

    def judged(self, drafted: int, nodes: Sequence[int]) -> None:
        """A round: of `drafted` nodes those of `nodes` stood."""
        for history in (self._own, self._shared):
            if self._trees:
                history.add_tree(drafted, nodes)
            else:
                history.add_chain(drafted, len(nodes))

    def offered(self, asked: int, given: int) -> None:
        """The drafter was asked for `asked` tokens and gave `given`."""
        self._offered = _REQUEST_MEMORY * self._offered + (1 - _REQUEST_MEMORY) * min(1.0, given / asked)

    @property
    def share_offered(self) -> float:
        """Expected share of an asked draft that comes."""
        return self._offered

    def gains(self, length: int) -> list[float]:
        """Chance of each of `length` drafts to stand: what each adds to the expected tokens of a round."""
        gains: list[float] = []
        shared, chance = _HOPE, 1.0
        for position in range(length):
            shared = self._shared.rate(position, shared, _HOPE_WEIGHT)
            rate = self._own.rate(position, shared, _SHARED_WEIGHT)
            chance = rate if self._trees else chance * rate
            gains.append(chance)
        return gains


def shared_history() -> AcceptanceHistory:
    """The memory that the requests of one drafter share."""
    return AcceptanceHistory(_DRAFTER_MEMORY)
