"""Tokens to text while they are generated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from dovetail.engine.tokenization.pieces import Pieces, decode_utf8
from dovetail.engine.tokenization.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CHAR_BYTES = 4
_NUM_CONTEXT = 8
"""Tokens before the new ones that are decoded with them, where text depends on neighbours."""


class Detokenizer(ABC):
    """The text of one sequence of output tokens, as far as later tokens cannot change it.

    The text is what the output adds to the prompt: a first token with a leading space keeps it. Characters come out
    whole; bytes that turn out not to be UTF-8 become U+FFFD.
    """

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that is new and final, "" if there is none."""

    @abstractmethod
    def finish(self) -> str:
        """No more tokens: returns what was held back, with U+FFFD for a character that was never completed."""


def create_detokenizer(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    kept_special_tokens: Sequence[int] = (),
) -> Detokenizer:
    """The one that suits the tokenizer, for what comes behind a prompt. `kept_special_tokens` are not skipped."""
    skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
    if kept_special_tokens:
        skipped -= frozenset(kept_special_tokens)
    pieces = tokenizer.pieces(skipped)
    if pieces is not None:
        return ByteDetokenizer(pieces, prompt_token_ids)
    if not kept_special_tokens:
        return WindowDetokenizer(lambda ids: tokenizer.decode(ids, skip_special_tokens), prompt_token_ids)
    return WindowDetokenizer(
        lambda ids: tokenizer.decode([token_id for token_id in ids if token_id not in skipped], False),
        prompt_token_ids,
    )


class ByteDetokenizer(Detokenizer):
    """Where each token stands for bytes: concatenate and decode."""

    def __init__(self, pieces: Pieces, prompt_token_ids: Sequence[int]):
        self._piece = pieces.of
        before = _last_bytes(pieces, prompt_token_ids)
        _, self._pending = decode_utf8(before, final=False)
        self._strips_space = pieces.strips_space and not before

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        text, self._pending = decode_utf8(self._pending + b"".join(map(self._piece, token_ids)), final=False)
        return self._stripped(text) if self._strips_space else text

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        text, self._pending = decode_utf8(self._pending, final=True)
        return self._stripped(text) if self._strips_space else text

    def _stripped(self, text: str) -> str:
        if not text:
            return text
        self._strips_space = False
        return text.removeprefix(" ")


def _last_bytes(pieces: Pieces, token_ids: Sequence[int]) -> bytes:
    """The prompt's last bytes, enough to hold a character that it leaves unfinished; b"" if it has no text."""
    found = b""
    for token in reversed(token_ids):
        found = pieces.of(token) + found
        if len(found) >= _CHAR_BYTES:
            break
    return found


class WindowDetokenizer(Detokenizer):
    """For any other decoder: decodes the new tokens behind a few that came before them.

    Exact where a token's text depends on at most `_NUM_CONTEXT` tokens before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int]):
        self._decode = decode
        self._ids = list(prompt_token_ids[-_NUM_CONTEXT:])
        self._num_done = len(self._ids)
        """Leading tokens of `_ids` whose text is out."""
        self._prefix = self._finished(self._ids)

    def _finished(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` without a character that they only begin: that one belongs to the output."""
        # Some decoders lose a whole run of bytes to its last, unfinished character, so the text of all is no help.
        for num_left_out in range(min(_CHAR_BYTES, len(token_ids))):
            text = self._decode(token_ids[: len(token_ids) - num_left_out])
            if not text.endswith(_REPLACEMENT):
                return text
        return self._decode(token_ids).rstrip(_REPLACEMENT) if token_ids else ""

    def push(self, token_ids: Sequence[int]) -> str:
        """See `Detokenizer.push`."""
        new = ""
        # One at a time, so that the result does not depend on how tokens were grouped.
        for token in token_ids:
            self._ids.append(token)
            new += self._advance()
        return new

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        return self._take(self._decode(self._ids)) if self._num_done < len(self._ids) else ""

    def _advance(self) -> str:
        text = self._decode(self._ids)
        # A character has at most four bytes: three tokens may be waiting for a fourth, more are no character.
        is_open = text.endswith(_REPLACEMENT) and len(self._ids) - self._num_done < _CHAR_BYTES
        return "" if is_open else self._take(text)

    def _take(self, text: str) -> str:
        # A decoder may change its mind about what is out already: then only what stands beyond it is new.
        new = text[len(self._prefix) :]
        self._ids = self._ids[-_NUM_CONTEXT:]
        self._num_done = len(self._ids)
        self._prefix = self._decode(self._ids)
        return new
