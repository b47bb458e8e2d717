"""A corpus whose places are sorted by what follows: a suffix array, to a limited depth.

Manber and Myers 1993, "Suffix Arrays", with prefix doubling: ranks by 2n tokens follow from ranks by n. All places
where some tokens occur are next to each other in it, and so are, among these, those that go on alike: both looking
tokens up and counting what followed them are binary searches (as in REST, He et al. 2024, section 3.1).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

END = -1
"""Follows each document in the text, and is no token."""
SAMPLED = 256
"""Places that are looked at to find the most frequent of the tokens that follow many."""


@dataclass(frozen=True)
class Places:
    """All places of the corpus where the same `depth` tokens occur: a part of the suffix array."""

    low: int
    high: int
    depth: int

    def __len__(self) -> int:
        return self.high - self.low


class CorpusIndex:
    """Documents, to be searched for up to `depth` tokens in a row."""

    def __init__(self, documents: Sequence[NDArray[np.int32]], depth: int):
        end = np.array([END], dtype=np.int32)
        parts = [part for document in documents for part in (document, end)]
        self._text: NDArray[np.int32] = np.concatenate(parts or [end]).astype(np.int32)
        self._order = _sorted_places(self._text, depth)
        self._depth = depth

    @property
    def num_bytes(self) -> int:
        """Memory of the index."""
        return self._text.nbytes + self._order.nbytes

    def everywhere(self) -> Places:
        """All places, with no token yet."""
        return Places(0, len(self._order), 0)

    def narrowed(self, places: Places, token: int) -> Places:
        """Those of `places` at which `token` comes next; possibly none."""
        if places.depth >= self._depth:
            return Places(places.low, places.low, places.depth + 1)
        inside = range(places.low, places.high)
        low = places.low + bisect_left(inside, token, key=lambda place: self._next(place, places.depth))
        high = places.low + bisect_right(inside, token, key=lambda place: self._next(place, places.depth))
        return Places(low, high, places.depth + 1)

    def find(self, tokens: Sequence[int]) -> Places:
        """The places where all these tokens occur in a row; possibly none."""
        places = self.everywhere()
        for token in tokens:
            places = self.narrowed(places, token)
            if not places:
                break
        return places

    def likeliest(self, places: Places) -> int:
        """The most frequent token that comes next, `END` where no document goes on. Of many places some are looked at,
        evenly spread."""
        if places.depth >= self._depth:
            return END
        looked_at = np.linspace(places.low, places.high - 1, min(len(places), SAMPLED)).astype(np.int64)
        # The last token of the text is END, and so is what lies behind it.
        following = self._text[np.minimum(self._order[looked_at] + places.depth, len(self._text) - 1)]
        tokens, counts = np.unique(following[following != END], return_counts=True)
        return int(tokens[counts.argmax()]) if len(tokens) else END

    def _next(self, place: int, depth: int) -> int:
        at = int(self._order[place]) + depth
        return int(self._text[at]) if at < len(self._text) else END


def _sorted_places(text: NDArray[np.int32], depth: int) -> NDArray[np.int32]:
    """int32 [n]: indices of `text` in the order of the `depth` tokens from each on, at least."""
    ranks = text.astype(np.int64) + 1
    size, width = len(text), 1
    while width < depth:
        # The text behind its end is END again.
        behind = np.concatenate((ranks[width:], np.zeros(min(width, size), dtype=np.int64)))
        keys = ranks * (int(ranks.max()) + 1) + behind
        order = np.argsort(keys, kind="stable")
        ranks[order] = np.cumsum(np.diff(keys[order], prepend=keys[order[0]]) != 0)
        width *= 2
        if ranks.max() == size - 1:  # all differ
            break
    return np.argsort(ranks, kind="stable").astype(np.int32)
