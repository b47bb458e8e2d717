"""Which requests are at which replica, and how many tokens they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Placement:
    """One request at a replica."""

    replica: int
    waiting_tokens: int
    """Tokens of its prompt that the replica has to compute; 0 when they are computed."""
    output_tokens: int
    """Tokens that it is expected to generate."""
    pending: tuple[bytes, ...] = ()
    """Blocks of its prompt that the replica will have when they are computed."""


class Placements:
    """All requests that were placed and did not end, with sums by replica. Every operation takes constant time."""

    def __init__(self) -> None:
        self._requests: dict[str, Placement] = {}
        self._tokens: dict[int, int] = {}
        self._counts: dict[int, int] = {}

    def place(self, request_id: str, placement: Placement) -> None:
        """A request was sent to a replica; it is at no other."""
        self._requests[request_id] = placement
        self._add(placement.replica, placement.waiting_tokens + placement.output_tokens, 1)

    def prefilled(self, request_id: str) -> Placement | None:
        """Its prompt is computed. Returns the placement as it was before, None for an unknown request."""
        placement = self._requests.get(request_id)
        if placement is None:
            return None
        self._add(placement.replica, -placement.waiting_tokens, 0)
        self._requests[request_id] = Placement(placement.replica, 0, placement.output_tokens)
        return placement

    def finished(self, request_id: str) -> Placement | None:
        """It ended. Returns its placement, None for an unknown request."""
        placement = self._requests.pop(request_id, None)
        if placement is not None:
            self._add(placement.replica, -placement.waiting_tokens - placement.output_tokens, -1)
        return placement

    def lost(self, replica: int) -> Iterator[Placement]:
        """Removes all requests of a replica, and yields their placements. Takes a pass over all requests."""
        gone = [request_id for request_id, placement in self._requests.items() if placement.replica == replica]
        for request_id in gone:
            placement = self.finished(request_id)
            assert placement is not None
            yield placement

    def tokens(self, replica: int) -> int:
        """Outstanding tokens of a replica's requests."""
        return self._tokens.get(replica, 0)

    def count(self, replica: int) -> int:
        """A replica's requests."""
        return self._counts.get(replica, 0)

    def _add(self, replica: int, tokens: int, count: int) -> None:
        if count == -1 and self._counts[replica] == 1:
            del self._counts[replica], self._tokens[replica]
            return
        self._counts[replica] = self._counts.get(replica, 0) + count
        self._tokens[replica] = self._tokens.get(replica, 0) + tokens
