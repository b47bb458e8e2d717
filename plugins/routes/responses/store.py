"""Responses that are kept for a while, in the memory of one API process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class Kept:
    """A response with the conversation that led to it."""

    expires_s: float
    data: bytes
    """JSON of response and items: a fraction of what the objects take."""


class ResponseStore:
    """Bounded in bytes and in time: the oldest responses go first."""

    def __init__(self, max_bytes: int, max_age_s: float, clock: Callable[[], float]):
        """`clock`: seconds, never going back."""
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self.num_bytes = 0

    def put(self, response: dict[str, Any], items: list[Any]) -> None:
        """Keeps a response, and `items`: those of its input and its output. One that is longer than all may be is not
        kept."""
        self._forget_old()
        data = orjson.dumps({"response": response, "items": items})
        self._kept[response["id"]] = Kept(self._clock() + self._max_age_s, data)
        self.num_bytes += len(data)
        while self.num_bytes > self._max_bytes:
            self.delete(next(iter(self._kept)))

    def response(self, response_id: str) -> dict[str, Any] | None:
        """A response; None where it is not kept."""
        found = self._find(response_id)
        return None if found is None else found["response"]

    def items(self, response_id: str) -> list[dict[str, Any]] | None:
        """The conversation up to the end of a response; None where it is not kept."""
        found = self._find(response_id)
        return None if found is None else found["items"]

    def delete(self, response_id: str) -> bool:
        """Whether it was kept."""
        kept = self._kept.pop(response_id, None)
        if kept is not None:
            self.num_bytes -= len(kept.data)
        return kept is not None

    def _find(self, response_id: str) -> dict[str, Any] | None:
        self._forget_old()
        kept = self._kept.get(response_id)
        return None if kept is None else orjson.loads(kept.data)

    def _forget_old(self) -> None:
        now = self._clock()
        while self._kept:
            response_id, kept = next(iter(self._kept.items()))
            if kept.expires_s > now:
                return
            self.delete(response_id)
