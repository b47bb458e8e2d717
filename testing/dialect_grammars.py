"""Grammars of dialects in llguidance: whether a text is accepted, and walks through what is.

The tokenizer has all bytes, and tokens for markers and for what JSON often has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from dovetail.testing.dialect_cases import tokens_of

_BYTES = [bytes([value]) for value in range(256)]
_FRAGMENTS = [b'"', b'": ', b'", "', b"}", b"{", b"[", b"]", b"1", b"true", b"ok", b"\n", b" and "]
_CLOSERS = frozenset(b'"}]\n')
_PRINTED = frozenset(range(32, 127))
_EOS = "<|end|>"
NUM_PLAIN = len(_BYTES) + len(_FRAGMENTS) + 1


class _Words:
    """What llguidance asks of a tokenizer."""

    def __init__(self, special: Iterable[str], other: Iterable[str]):
        self.special = list(special)
        self.tokens = [*_BYTES, *_FRAGMENTS, _EOS.encode(), *(token.encode() for token in (*self.special, *other))]
        self.eos_token_id = NUM_PLAIN - 1
        self.bos_token_id = None
        self.special_token_ids = [NUM_PLAIN - 1, *range(NUM_PLAIN, NUM_PLAIN + len(self.special))]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def special_ids(markers: Iterable[str]) -> dict[str, int]:
    """The ids of those markers that look like special tokens, as a `DialectSetup` has them."""
    tokens = [marker for marker in markers if marker[0] in "<[" and marker[-1] in ">]"]
    return {token: NUM_PLAIN + index for index, token in enumerate(tokens)}


class GrammarChecker:
    """One grammar over one tokenizer."""

    def __init__(self, grammar: str, special_tokens: Mapping[str, int], markers: Iterable[str]):
        """Raises `AssertionError` for a grammar that llguidance refuses."""
        words = _Words(special_tokens, [marker for marker in markers if marker not in special_tokens])
        self._ids = dict(special_tokens)
        self._texts = words.tokens
        wrapper: Any = TokenizerWrapper(words)
        self._tokenizer = LLTokenizer(wrapper)
        self._eos = words.eos_token_id
        self._markers = frozenset(range(NUM_PLAIN, len(words.tokens)))
        self._grammar = grammar
        problem = LLMatcher.validate_grammar(grammar, self._tokenizer)
        assert not problem, f"llguidance refuses the grammar: {problem}\n{grammar}"

    def accepts(self, text: str) -> bool:
        """Whether the text may be a whole completion."""
        matcher = self._new()
        ids = self._tokenized(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def furthest(self, text: str) -> str:
        """How far the text is accepted: for messages."""
        ids = self._tokenized(text)
        return b"".join(self._texts[i] for i in ids[: self._new().try_consume_tokens(ids)]).decode(errors="replace")

    def walk(self, random: Random, most: int = 400) -> tuple[str, bool]:
        """A text that is accepted, and whether it is whole; otherwise it was cut off after `most` tokens."""
        matcher, ids = self._new(), list[int]()
        for _ in range(most):
            allowed = self._allowed(matcher)
            choice = self._chosen(allowed, random, len(ids))
            if choice == self._eos:
                return self._text(ids), True
            assert matcher.consume_token(choice), matcher.get_error()
            ids.append(choice)
            if matcher.is_stopped():
                return self._text(ids), True
        return self._text(ids), False

    def _allowed(self, matcher: LLMatcher) -> np.ndarray:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(self._texts)])

    def _chosen(self, allowed: np.ndarray, random: Random, length: int) -> int:
        """Mostly tokens that bring a text on: its end, markers, what closes JSON; the longer it is the more."""
        ids = set(allowed.tolist())
        if self._eos in ids and random.random() < 0.1 + length / 100:
            return self._eos
        for group, chance in ((self._markers, 0.4), (_CLOSERS, 0.3 + length / 300), (_PRINTED, 1.0)):
            some = sorted(ids & group)
            if some and random.random() < chance:
                return random.choice(some)
        return random.choice(sorted(ids))

    def _new(self) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, self._grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def _text(self, ids: list[int]) -> str:
        return b"".join(self._texts[i] for i in ids).decode()

    def _tokenized(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in tokens_of(text, self._ids):
            ids += [self._ids[piece]] if piece in self._ids else list(piece.encode())
        return ids
