"""Answers of finished requests, searchable by their tokens.

A suffix tree in Python costs hundreds of bytes and several dictionary operations per token and level. Here the answers
lie in one array, with a table of their pairs of tokens sorted by pair: looking a pair up is a binary search, and the
longer match is found by comparing arrays. New answers wait in a short tail that is searched from end to end; when it
has grown, it is merged into the table, and there the least recently used answers give way.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from dovetail.spec_decode.suffix.matching import MAX_MATCHES, NOTHING

_MIN_TAIL = 8192
_TAIL_SHARE = 8
"""The tail is merged once it holds this part of what the table holds: so a token is sorted a few times in all."""


class AnswerStore:
    """At most `max_tokens` tokens of answers, with `before` empty places in front and `after` behind."""

    def __init__(self, max_tokens: int, before: int, after: int):
        self._max_tokens = max_tokens
        self._before = before
        self._after = after
        self._answers: dict[int, NDArray[np.int32]] = {}
        """By number, oldest use first: a dict keeps the order of insertion."""
        self._next = 0
        self.text = np.full(before + after, NOTHING, dtype=np.int32)
        """All answers, each followed by one `NOTHING`."""
        self._numbers: list[int] = []
        """The number of each answer, in the order of `text`."""
        self._starts: list[int] = []
        """Where each begins."""
        self._size = before
        """Used part of `text`."""
        self._sorted_until = before
        self._keys = np.empty(0, dtype=np.int64)
        self._places = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Tokens held."""
        return sum(len(answer) for answer in self._answers.values())

    def add(self, tokens: NDArray[np.int32]) -> None:
        """Takes an answer in, the last `max_tokens` tokens of it."""
        answer = np.array(tokens[-self._max_tokens :], dtype=np.int32)
        if len(answer) < 2 or self._max_tokens == 0:
            return
        self._answers[self._next] = answer
        self._append(self._next, answer)
        self._next += 1
        num_sorted, num_new = self._sorted_until - self._before, self._size - self._sorted_until
        is_full = num_sorted + num_new - len(self._starts) > self._max_tokens
        if is_full or num_new > max(_MIN_TAIL, num_sorted // _TAIL_SHARE):
            self._merge()

    def ends(self, suffix: NDArray[np.int32]) -> NDArray[np.int64]:
        """Indices in `text` after the latest occurrences of the last two tokens of `suffix`, ascending."""
        if self._size == self._before or len(suffix) < 2:
            return np.empty(0, dtype=np.int64)
        first, second = int(suffix[-2]), int(suffix[-1])
        key = (first << 32) | second
        low = int(self._keys.searchsorted(key))
        high = low + int(self._keys[low:].searchsorted(key, "right")) if low < len(self._keys) else low
        found = self._places[max(low, high - MAX_MATCHES) : high]
        tail = self.text[self._sorted_until : self._size]
        if len(tail):
            recent = ((tail[1:] == second) & (tail[:-1] == first)).nonzero()[0] + (self._sorted_until + 2)
            found = np.concatenate([found, recent])
        return found[-MAX_MATCHES:]

    def touch(self, place: int) -> None:
        """Says that a guess was read from the answer at `place` of `text`."""
        number = self._numbers[bisect_right(self._starts, place) - 1]
        self._answers[number] = self._answers.pop(number)

    def _append(self, number: int, answer: NDArray[np.int32]) -> None:
        needed = self._size + len(answer) + 1 + self._after
        if needed > len(self.text):
            grown = np.full(max(needed, 2 * len(self.text)), NOTHING, dtype=np.int32)
            grown[: self._size] = self.text[: self._size]
            self.text = grown
        self.text[self._size : self._size + len(answer)] = answer
        self._numbers.append(number)
        self._starts.append(self._size)
        self._size += len(answer) + 1

    def _merge(self) -> None:
        """Drops what is too much and sorts the pairs of all that is left."""
        # Room for the next tail, so that a full store is not sorted anew with every answer.
        room = self._max_tokens - self._max_tokens // (_TAIL_SHARE + 1)
        total = len(self)
        for number in list(self._answers):
            if total <= room or len(self._answers) == 1:
                break
            total -= len(self._answers.pop(number))
        kept = sorted(self._answers)
        self.text = np.full(self._before + total + len(kept) + self._after, NOTHING, dtype=np.int32)
        self._numbers, self._starts = [], []
        self._size = self._before
        for number in kept:
            self._append(number, self._answers[number])
        self._sort()

    def _sort(self) -> None:
        part = self.text[self._before : self._size].astype(np.int64)
        keys = (part[:-1] << 32) | (part[1:] & 0xFFFFFFFF)
        whole = (part[:-1] != NOTHING) & (part[1:] != NOTHING)
        places = whole.nonzero()[0]
        order = keys[places].argsort(kind="stable")
        self._keys = keys[places][order]
        self._places = places[order] + (self._before + 2)
        self._sorted_until = self._size
