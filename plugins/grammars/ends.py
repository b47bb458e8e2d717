"""Ends of sequence, which the contract wants alike and libraries treat each in their own way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import GrammarSetup, Matcher

NO_WAY_ON = "no token can follow: the grammar allows no text here, or the vocabulary cannot spell what it allows"


class Automaton(ABC):
    """What a library knows of one sequence, without end tokens."""

    @abstractmethod
    def fill(self, row: NDArray[np.int32]) -> None:
        """As `Matcher.fill_mask`; what it says of end tokens does not matter, and neither do bits behind the
        vocabulary."""

    @abstractmethod
    def take(self, token_id: int) -> bool:
        """Takes one token of the vocabulary if it is legal."""

    @abstractmethod
    def undo(self, num_tokens: int) -> None:
        """Takes back the last tokens, at least one."""

    @abstractmethod
    def forced(self) -> tuple[int, ...]:
        """As `Matcher.forced`."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the text may end here."""

    @abstractmethod
    def is_stuck(self) -> bool:
        """Whether it is complete and nothing can follow."""


class Ends:
    """The end tokens of a vocabulary."""

    def __init__(self, setup: GrammarSetup):
        self.token_ids = frozenset(setup.eos_token_ids)
        self.vocab_size = setup.vocab_size
        self.row_size = -(-setup.vocab_size // 32)
        self.bits = self._bits(sorted(self.token_ids))
        """int32 [row_size]: a mask of the end tokens alone."""
        self.others = self._bits(range(setup.vocab_size)) & ~self.bits
        """And of all other tokens."""

    def _bits(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        flags = np.zeros(self.row_size * 32, dtype=np.uint8)
        flags[list(token_ids)] = 1
        return np.packbits(flags, bitorder="little").view(np.int32)


class EndingMatcher(Matcher):
    """An automaton, and the end tokens behind it."""

    def __init__(self, automaton: Automaton, ends: Ends):
        self._automaton = automaton
        self._ends = ends
        self._num_tokens = 0
        """That the automaton took."""
        self._num_ends = 0

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        """As `Matcher.fill_mask`."""
        if self.is_done:
            row[:] = self._ends.bits
            return
        self._automaton.fill(row)
        row &= self._ends.others
        if self._automaton.is_complete():
            row |= self._ends.bits
        elif not row.any():
            raise RequestError(NO_WAY_ON)

    def advance(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """As `Matcher.advance`."""
        for count, token_id in enumerate(token_ids):
            if not self._take(int(token_id)):
                return count
        return len(token_ids)

    def _take(self, token_id: int) -> bool:
        if token_id in self._ends.token_ids:
            if not self.may_end:
                return False
            self._num_ends += 1
            return True
        if self._num_ends or not 0 <= token_id < self._ends.vocab_size or not self._automaton.take(token_id):
            return False
        self._num_tokens += 1
        return True

    def rollback(self, num_tokens: int) -> None:
        """As `Matcher.rollback`."""
        if not 0 <= num_tokens <= self._num_tokens + self._num_ends:
            raise ValueError(f"{num_tokens} tokens cannot be taken back, of {self._num_tokens + self._num_ends}")
        ends = min(num_tokens, self._num_ends)
        self._num_ends -= ends
        if others := num_tokens - ends:
            self._automaton.undo(others)
            self._num_tokens -= others

    def legal_prefix(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """As `Matcher.legal_prefix`."""
        count = self.advance(token_ids)
        self.rollback(count)
        return count

    def forced(self) -> tuple[int, ...]:
        """As `Matcher.forced`."""
        return () if self.is_done else self._automaton.forced()

    @property
    def may_end(self) -> bool:
        """As `Matcher.may_end`."""
        return self._num_ends > 0 or self._automaton.is_complete()

    @property
    def is_done(self) -> bool:
        """As `Matcher.is_done`."""
        return self._num_ends > 0 or self._automaton.is_stuck()
