"""Walks that draw outputs from the masks of a grammar, and what is asked of matchers in tests."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.contracts.grammar import CompiledGrammar, Matcher
from dovetail.contracts.grammar_spec import GrammarSpec
from dovetail.testing import grammar_cases as cases
from dovetail.testing.grammar_cases import Vocabulary

MOST_TOKENS = 120
"""Of one walk."""
_CLOSERS = frozenset(b'"}]),>')


class Walk:
    """Draws an output from the masks, with a preference for what closes, so that it ends."""

    def __init__(self, matcher: Matcher, vocabulary: Vocabulary, seed: int):
        self.matcher = matcher
        self.vocabulary = vocabulary
        self.tokens: list[int] = []
        self._random = np.random.default_rng([seed, 77])

    def legal(self) -> list[int]:
        """Tokens of the mask."""
        return bits(mask_of(self.matcher, self.vocabulary))

    def step(self) -> bool:
        """Takes one token that does not end the sequence; False where there is none."""
        legal = [token_id for token_id in self.legal() if token_id not in self.vocabulary.end_ids]
        if not legal:
            return False
        closing = [i for i in legal if (self.vocabulary.token_bytes[i] or b"x")[-1] in _CLOSERS]
        among = closing if closing and self._random.random() < 0.5 else legal
        token_id = int(self._random.choice(among))
        assert self.matcher.advance([token_id]) == 1, f"the mask has token {token_id}, which is not taken"
        self.tokens.append(token_id)
        return True

    def run(self, most: int = MOST_TOKENS) -> list[int]:
        """Steps until nothing follows, or half of the times where it may end; all tokens."""
        while len(self.tokens) < most and self.step():
            if self.matcher.may_end and self._random.random() < 0.5:
                break
        return self.tokens

    def story(self, spec: GrammarSpec) -> str:
        """For messages: where the walk is."""
        return f"{spec.form} after {self.vocabulary.decode(self.tokens)!r} ({self.tokens})"


def outputs(compiled: CompiledGrammar, vocabulary: Vocabulary, count: int = 12, at_least: int = 1) -> list[bytes]:
    """Complete outputs of `count` walks; walks that come to no end are left out, of which not all may be."""
    found = []
    for seed in range(count):
        walk = Walk(compiled.start(), vocabulary, seed)
        walk.run()
        if walk.matcher.may_end:
            found.append(vocabulary.decode(walk.tokens))
    assert len(found) >= at_least, "no walk came to an end"
    return found


def accepts(compiled: CompiledGrammar, vocabulary: Vocabulary, text: bytes) -> bool:
    """Whether a text is possible as a whole, in the tokens that the tokenizer gives it."""
    is_bytes = vocabulary is cases.byte_vocabulary()
    tokens = list(text) if is_bytes else vocabulary.encode(text.decode())
    matcher = compiled.start()
    return matcher.advance(tokens) == len(tokens) and matcher.may_end


def schema_spec(schema: Any, max_whitespace: int | None = None) -> GrammarSpec:
    """A JSON Schema as a spec."""
    return GrammarSpec(form="json_schema", source=json.dumps(schema), max_whitespace=max_whitespace)


def compact(value: Any) -> bytes:
    """JSON without whitespace."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def row_size(vocabulary: Vocabulary) -> int:
    """Entries of a row of a mask."""
    return -(-vocabulary.vocab_size // 32)


def mask_of(matcher: Matcher, vocabulary: Vocabulary) -> NDArray[np.int32]:
    """A row that held other things before."""
    row = np.full(row_size(vocabulary), 0x0F0F0F0F, np.int32)
    matcher.fill_mask(row)
    return row


def bits(row: NDArray[np.int32]) -> list[int]:
    """Ids of the tokens that a row allows."""
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found


def state_of(matcher: Matcher, vocabulary: Vocabulary) -> tuple[bytes, tuple[int, ...], bool, bool]:
    """All that a matcher says of itself."""
    return mask_of(matcher, vocabulary).tobytes(), matcher.forced(), matcher.may_end, matcher.is_done
