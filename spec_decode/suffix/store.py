"""Answers of finished requests, searchable by their tokens.

A suffix tree in Python costs hundreds of bytes and several dictionary operations per token and level. Here the answers
lie in one array, with a table of their pairs of tokens: one sorted array of integers, each the hash of a pair above the
place where it ends. Looking a pair up is a binary search, and longer matches are found by comparing arrays, which rules
out pairs of equal hash as well. New answers wait in a short tail that is searched from end to end; when it has grown it
is merged into the table, and the least recently used answers are dropped.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.spec_decode.matching import MAX_MATCHES, NOTHING

_MAX_TAIL = 8192
_SPARE = 8
"""Share of the store that is freed when it is full, so that a full store is not rebuilt with every merge."""
_PLACE_BITS = 28
_HASH_MASK = (1 << 34) - 1


class AnswerStore:
    """At most `max_tokens` tokens of answers, with `before` empty entries in front and `after` behind."""

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
        self._pairs = np.empty(0, dtype=np.int64)
        """Sorted: hash of a pair, then the index after it."""

    def __len__(self) -> int:
        """Number of tokens held."""
        return sum(len(answer) for answer in self._answers.values())

    def add(self, tokens: NDArray[np.int32]) -> None:
        """Takes an answer in, the last `max_tokens` tokens of it."""
        answer = np.array(tokens[-self._max_tokens :], dtype=np.int32)
        if len(answer) < 2 or self._max_tokens == 0:
            return
        self._answers[self._next] = answer
        self._append(self._next, answer)
        self._next += 1
        is_full = self._size - self._before - len(self._starts) > self._max_tokens
        if is_full or self._size - self._sorted_until > _MAX_TAIL:
            self._merge()

    def ends(self, suffix: NDArray[np.int32]) -> NDArray[np.int64]:
        """Indices in `text` after the latest occurrences of the last two tokens of `suffix`, ascending."""
        if self._size == self._before or len(suffix) < 2:
            return np.empty(0, dtype=np.int64)
        first, second = int(suffix[-2]), int(suffix[-1])
        key = _hash(first, second) << _PLACE_BITS
        low, high = self._pairs.searchsorted(np.array([key, key + (1 << _PLACE_BITS)])).tolist()
        found = self._pairs[max(low, high - MAX_MATCHES) : high] & ((1 << _PLACE_BITS) - 1)
        tail = self.text[self._sorted_until : self._size]
        recent = ((tail[1:] == second) & (tail[:-1] == first)).nonzero()[0]
        if len(recent):
            found = np.concatenate([found, recent + (self._sorted_until + 2)])
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
        """Merges the pairs of the tail; if the store is full, first drops answers."""
        total = len(self)
        if total > self._max_tokens:
            for number in list(self._answers):
                if total <= self._max_tokens - self._max_tokens // _SPARE or len(self._answers) == 1:
                    break
                total -= len(self._answers.pop(number))
            self._rebuild(total)
        part = self.text[self._sorted_until : self._size].astype(np.int64)
        whole = ((part[:-1] != NOTHING) & (part[1:] != NOTHING)).nonzero()[0]
        hashes = _hash(part[whole], part[whole + 1])
        pairs = (hashes << _PLACE_BITS) | (whole + (self._sorted_until + 2))
        self._pairs = np.sort(np.concatenate([self._pairs, pairs]))
        self._sorted_until = self._size

    def _rebuild(self, total: int) -> None:
        kept = sorted(self._answers)
        self.text = np.full(self._before + total + len(kept) + self._after, NOTHING, dtype=np.int32)
        self._numbers, self._starts = [], []
        self._size = self._sorted_until = self._before
        self._pairs = np.empty(0, dtype=np.int64)
        for number in kept:
            self._append(number, self._answers[number])


def _hash(first: Any, second: Any) -> Any:
    """34 bits of two tokens, of integers or arrays of int64 alike."""
    return (first * 0x9E3779B1 + second * 0x7FEB352D) & _HASH_MASK
