"""Special tokens of a tokenizer, and texts in which their names stand for them."""

from __future__ import annotations

import json
import re

from dovetail.contracts.errors import RequestError


class SpecialTokens:
    """Those that the tokenizer's JSON marks as special: they stand for no text of the output."""

    def __init__(self, tokenizer_json: str):
        added = json.loads(tokenizer_json).get("added_tokens") or ()
        self.by_name = {token["content"]: int(token["id"]) for token in added if token["special"]}
        names = sorted(self.by_name, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def pieces(self, text: str) -> list[str | int]:
        """A text in pieces: strings, and ids of special tokens in place of their names."""
        parts = self._split.split(text) if self._split else [text]
        return [self.by_name.get(part, part) for part in parts if part]


def choices_of(source: str) -> list[str]:
    """The strings of the form `choice`. Raises `RequestError` for anything else."""
    try:
        choices = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"choices are a JSON array of strings: {error}") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise RequestError("choices are a JSON array of strings, with at least one")
    for choice in choices:
        try:
            choice.encode()
        except UnicodeEncodeError:
            raise RequestError(f"the choice {choice!r} has half of a character, which no output can have") from None
    return choices
