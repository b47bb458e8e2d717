"""Which tokens a response's text was written with: the log probabilities of each part of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dovetail.contracts.dialect import Event, TextDelta
from dovetail.contracts.outputs import CompletionOutput
from dovetail.plugins.routes.chat.logprobs import chat_logprobs
from dovetail.plugins.routes.completions.logprobs import TextOffsets, TokenTexts
from dovetail.plugins.server.turns.reading import TurnReader


@dataclass(frozen=True, slots=True)
class _Token:
    begin: int
    """Where its text begins in the model's."""
    entry: dict[str, Any]


class TokenReader:
    """Reads one completion token by token, and finds the tokens of its text among those of markers, reasoning and
    calls. A token of which a part is text counts as text."""

    def __init__(self, reader: TurnReader, token_texts: TokenTexts, num_top: int):
        """`num_top`: how many alternatives each entry has."""
        self._reader = reader
        self._token_texts = token_texts
        self._num_top = num_top
        self._offsets = TextOffsets()
        self._text = ""
        """As the model wrote it."""
        self._num_read = 0
        """Characters of it that the parser has."""
        self._num_found = 0
        """Characters of it that events are known to come from."""
        self._waiting: deque[_Token] = deque()
        """Tokens from `_num_found` on."""

    def read(self, completion: CompletionOutput) -> Iterator[tuple[Event, list[dict[str, Any]]]]:
        """The events of what is new, each with the entries of its tokens, where it is text."""
        self._text += completion.text
        texts = self._token_texts(completion.token_ids)
        found = chat_logprobs(
            completion.token_ids, completion.logprobs or (), self._num_top, self._token_texts, as_ids=False
        )
        for text, entry in zip(texts, found["content"], strict=True):
            # What was read came from the tokens before; of a part of a character the offset alone does not tell.
            begin = max(self._offsets.add(text, self._text), self._num_read)
            yield from self._read_to(begin, None)
            self._waiting.append(_Token(begin, entry))
        yield from self._read_to(len(self._text), completion.finish_reason)

    def _read_to(self, end: int, finish_reason: str | None) -> Iterator[tuple[Event, list[dict[str, Any]]]]:
        begin, self._num_read = self._num_read, max(self._num_read, end)
        for event in self._reader.read_text(self._text[begin : self._num_read], finish_reason):
            if isinstance(event, TextDelta):
                yield event, self._tokens_of(event.text)
            else:
                # What it was made from is no text: that is behind it.
                self._num_found = max(self._num_found, begin)
                yield event, []

    def _tokens_of(self, text: str) -> list[dict[str, Any]]:
        begin = self._text.find(text, self._num_found, self._num_read)
        end = begin + len(text)
        entries = []
        while self._waiting and self._waiting[0].begin < end:
            token = self._waiting.popleft()
            behind = self._waiting[0].begin if self._waiting else self._num_read
            if token.begin >= begin or behind > begin:
                entries.append(token.entry)
        self._num_found = end
        return entries
