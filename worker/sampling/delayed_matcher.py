"""A grammar that begins behind a marker: free text, such as a model's reasoning, comes first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dovetail.contracts.grammar import Matcher


class DelayedMatcher(Matcher):
    """Until the output has had `marker`, every token but ends of sequence is legal; from then on it is `inner`."""

    def __init__(self, inner: Matcher, marker: Sequence[int], vocab_size: int, eos_token_ids: Sequence[int]):
        """`marker`: at least one token id."""
        self._inner = inner
        self._marker = list(marker)
        self._vocab_size = vocab_size
        self._ends = frozenset(eos_token_ids)
        self._free: list[int] = []
        """Tokens up to the marker's last."""
        self._num_inner = 0
        """Tokens behind it."""
        self._has_begun = False

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        """As `Matcher.fill_mask`."""
        if self._has_begun:
            self._inner.fill_mask(row)
            return
        legal = np.zeros(32 * len(row), np.bool_)
        legal[: self._vocab_size] = True
        legal[list(self._ends)] = False
        row[:] = np.packbits(legal, bitorder="little").view(np.int32)

    def advance(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """As `Matcher.advance`."""
        for index, token in enumerate(map(int, token_ids)):
            if self._has_begun:
                taken = self._inner.advance(token_ids[index:])
                self._num_inner += taken
                return index + taken
            if token in self._ends or not 0 <= token < self._vocab_size:
                return index
            self._free.append(token)
            self._has_begun = self._free[-len(self._marker) :] == self._marker
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """As `Matcher.rollback`."""
        if not 0 <= num_tokens <= len(self._free) + self._num_inner:
            raise ValueError(f"{num_tokens} tokens cannot be taken back of {len(self._free) + self._num_inner}")
        num_inner = min(num_tokens, self._num_inner)
        if num_inner:
            self._inner.rollback(num_inner)
            self._num_inner -= num_inner
        if num_tokens > num_inner:
            del self._free[num_inner - num_tokens :]
            self._has_begun = False  # the marker ends with the last free token

    def legal_prefix(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """As `Matcher.legal_prefix`."""
        taken = self.advance(token_ids)
        self.rollback(taken)
        return taken

    def forced(self) -> tuple[int, ...]:
        """As `Matcher.forced`."""
        return self._inner.forced() if self._has_begun else ()

    @property
    def may_end(self) -> bool:
        """As `Matcher.may_end`."""
        return self._has_begun and self._inner.may_end

    @property
    def is_done(self) -> bool:
        """As `Matcher.is_done`."""
        return self._has_begun and self._inner.is_done
