"""Log probabilities in the shape of /v1/completions: four lists with an entry per token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dovetail.contracts.outputs import Logprob, PositionLogprobs

LOWEST = -9999.0
"""In place of minus infinity, which JSON does not have."""

TokenTexts = Callable[[Iterable[int]], list[str]]


class TextOffsets:
    """Where each token's text begins in a text that may still grow.

    The texts of tokens mostly add up to the text. Where they do not (a character in several tokens, each of which reads
    U+FFFD alone; special tokens, which the text leaves out), the next token that is found sets the offset right.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._num_pieces = 0
        """Tokens since the last one whose text was found that are parts of characters."""

    def add(self, token_text: str, text: str) -> int:
        """The offset of the next token. `text`: as much of it as there is."""
        if "\ufffd" in token_text:
            self._num_pieces += 1
            return self._offset
        if self._num_pieces:
            found = text.find(token_text, self._offset, self._offset + self._num_pieces + len(token_text))
            self._offset = found if found >= 0 else self._offset + 1
            self._num_pieces = 0
        start, rest = self._offset, text[self._offset : self._offset + len(token_text)]
        if token_text.startswith(rest):  # all of it, or as much as the text has by now
            self._offset += len(token_text)
        return start


class LogprobLists:
    """Makes the lists of one completion, in one go or in deltas."""

    def __init__(self, token_texts: TokenTexts, *, as_ids: bool = False):
        """`as_ids`: tokens are shown as "token_id:N" in place of their text."""
        self._token_texts = token_texts
        self._as_ids = as_ids
        self._offsets = TextOffsets()
        self._text = ""

    def add(
        self, text: str, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> dict[str, list[Any]]:
        """The lists of these tokens. `text` is what is new of the completion's, `positions` has an entry per token."""
        self._text += text
        texts = self._token_texts(token_ids)
        lists: dict[str, list[Any]] = {
            "tokens": self._shown(token_ids),
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, token_text, position in zip(token_ids, texts, positions, strict=True):
            lists["text_offset"].append(self._offsets.add(token_text, self._text))
            lists["token_logprobs"].append(_number(position[token_id]) if position is not None else None)
            lists["top_logprobs"].append(self._top(position) if position is not None else None)
        masses = [
            None if position is None else position[token_id].surviving_mass
            for token_id, position in zip(token_ids, positions, strict=True)
        ]
        if any(mass is not None for mass in masses):  # of processed log probabilities; a field of ours
            lists["surviving_mass"] = masses
        return lists

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """Of tokens with the same text the likeliest counts."""
        top: dict[str, float] = {}
        for text, logprob in zip(self._shown(position), position.values(), strict=True):
            top[text] = max(_number(logprob), top.get(text, LOWEST))
        return top

    def _shown(self, token_ids: Iterable[int]) -> list[str]:
        return [f"token_id:{token}" for token in token_ids] if self._as_ids else self._token_texts(token_ids)


def prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> list[Any] | None:
    """vLLM's field of that name."""
    if positions is None:
        return None
    return [
        position
        and {
            str(token): {"logprob": _number(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token, entry in position.items()
        }
        for position in positions
    ]


def _number(entry: Logprob) -> float:
    return max(entry.logprob, LOWEST)
