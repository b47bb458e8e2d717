"""JSON that comes in pieces: how far a value goes, and whether it is one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR_CHARS = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_MAY_GO_ON = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?\Z"
)
"""The begin of an escape, or of the two that are one character."""
_REPLACEMENT = "\\ufffd"
_SPACE = " \t\r\n"
_DEEPEST = 200
"""Levels of nesting; Python's own reader fails at some thousand."""


class JSONReader:
    """Follows one JSON object or array. Text comes out as it came, but for what models write in strings and no client
    can read: control characters are escaped, half of a surrogate pair becomes U+FFFD."""

    def __init__(self) -> None:
        self.is_done = False
        """The value is whole."""
        self.is_broken = False
        """The text is no JSON value; what was read of it is the begin of one."""
        self._next = self._value
        self._open: list[str] = []
        self._is_key = False
        self._scalar = ""
        self._waits = False
        self._pieces: list[str] = []

    def read(self, text: str) -> tuple[str, int]:
        """What of the text belongs to the value, as it comes out, and its length before that. An escape that is not
        whole is left: give it again, with what follows it."""
        at, self._waits = 0, False
        while at < len(text) and not (self.is_done or self.is_broken or self._waits):
            at = self._next(text, at)
        piece = "".join(self._pieces)
        self._pieces.clear()
        return piece, at

    def _take(self, text: str, at: int) -> int:
        self._pieces.append(text[at])
        return at + 1

    def _break(self, at: int) -> int:
        self.is_broken = True
        return at

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char in _SPACE:
            return self._take(text, at)
        if char == '"':
            self._is_key, self._next = False, self._string
        elif char in "{[" and len(self._open) < _DEEPEST:
            self._open.append("}" if char == "{" else "]")
            self._next = self._first
        elif self._open and _SCALAR_CHARS.match(char):
            self._scalar, self._next = "", self._rest_of_scalar
            return at
        else:
            return self._break(at)
        return self._take(text, at)

    def _first(self, text: str, at: int) -> int:
        """The first item, or none."""
        if text[at] == self._open[-1]:
            return self._behind_value(text, at)
        if text[at] not in _SPACE:
            self._next = self._key if self._open[-1] == "}" else self._value
            return at
        return self._take(text, at)

    def _key(self, text: str, at: int) -> int:
        if text[at] == '"':
            self._is_key, self._next = True, self._string
        elif text[at] not in _SPACE:
            return self._break(at)
        return self._take(text, at)

    def _colon(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._next = self._value
        elif text[at] not in _SPACE:
            return self._break(at)
        return self._take(text, at)

    def _string(self, text: str, at: int) -> int:
        plain = _PLAIN.match(text, at)
        if plain is not None:
            self._pieces.append(plain.group())
            return plain.end()
        if text[at] == '"':
            self._next = self._colon if self._is_key else self._behind_value
        elif text[at] == "\\":
            return self._escape(text, at)
        else:
            self._pieces.append(json.dumps(text[at])[1:-1])
            return at + 1
        return self._take(text, at)

    def _escape(self, text: str, at: int) -> int:
        if _MAY_GO_ON.match(text, at) is not None:
            self._waits = True
            return at
        pair = _PAIR.match(text, at)
        escape = pair or _ESCAPE.match(text, at)
        if escape is None:
            return self._break(at)
        is_half = pair is None and _SURROGATE.match(text, at) is not None
        self._pieces.append(_REPLACEMENT if is_half else escape.group())
        return escape.end()

    def _rest_of_scalar(self, text: str, at: int) -> int:
        more = _SCALAR_CHARS.match(text, at)
        if more is not None:
            self._scalar += more.group()
            self._pieces.append(more.group())
            return more.end()
        if _SCALAR.fullmatch(self._scalar) is None:
            return self._break(at)
        self._next = self._behind_value
        return at

    def _behind_value(self, text: str, at: int) -> int:
        char = text[at]
        if char == self._open[-1]:
            self._open.pop()
            self.is_done, self._next = not self._open, self._behind_value
        elif char == ",":
            self._next = self._key if self._open[-1] == "}" else self._value
        elif char not in _SPACE:
            return self._break(at)
        return self._take(text, at)


def raw_items(text: str) -> Iterator[tuple[str, str]]:
    """The keys of a JSON object and the text of their values, as it is spelled. Raises `ValueError` for other text."""
    decoder = json.JSONDecoder(strict=False)
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        raise ValueError(f"arguments must be a JSON object, got {text[:80]!r}")
    at = _skip(text, at + 1)
    while text[at : at + 1] != "}":
        key, at = decoder.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)  # behind the colon
        _, at = decoder.raw_decode(text, begin)
        yield key, text[begin:at]
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at
