"""Arguments as tagged text, read into JSON with the types of the tool's schema.

A value that may be a string is one, unless it reads as another type that the schema allows. Numbers stay as they are
written. Strings, objects and arrays come out as they come in; a number, `true`, `false` and `null` when their tag ends,
since until then they may go on as a string.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.contracts.dialect import DialectRequest
from dovetail.plugins.dialects.json_text import JSONReader
from dovetail.plugins.dialects.parsing import ArgumentsReader
from dovetail.plugins.dialects.schema_types import types_of
from dovetail.plugins.dialects.shapes import LINE_BREAK, SPACE, Part, Shape, alt, group, lit, seq

CLOSE_PARAMETER = "</parameter>"

_NUMBER = Part(
    r"(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)",
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE][-+]?[0-9]*)?)?|[eE][-+]?[0-9]*)?)?",
)
_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}
_WORD = Part(f"(?P<word>{'|'.join(_WORDS)})", f"(?:{'|'.join(lit(word + ' ').begun for word in _WORDS)})")
_SCALAR = Shape(seq(SPACE, alt(_NUMBER, _WORD), SPACE, lit(CLOSE_PARAMETER)))
_PARAMETER = Shape(seq(SPACE, lit("<parameter="), group("key", r"[^>\n]"), lit(">")))
_FUNCTION_END = Shape(seq(SPACE, lit("</function>")))
_VALUE_END = Shape(seq(SPACE, lit(CLOSE_PARAMETER)))
_STRING_END = Shape(seq(LINE_BREAK, lit(CLOSE_PARAMETER)))
_TAG_BEGIN = Shape(seq(SPACE, lit("<parameter= ")))
"""With a space that no tag has, so that all of a tag before its key begins it."""
_TYPES = {"true": "boolean", "false": "boolean", "null": "null"}


class XMLArguments(ArgumentsReader):
    """Reads the tags between `<function=name>` and `</function>`."""

    def __init__(self, request: DialectRequest, name: str):
        schemas = [tool.parameters for tool in request.tools if tool.name == name and tool.parameters is not None]
        self._root: Mapping[str, Any] = schemas[0] if schemas else {}
        self._types: frozenset[str] = frozenset()
        self._json: JSONReader | None = None
        self._opening, self._separator = "{", ""
        self._state: Callable[[str], tuple[str, int] | None] = self._between

    def read(self, text: str) -> tuple[str, int]:
        """See `ArgumentsReader.read`."""
        pieces, at = [self._opening], 0
        self._opening = ""
        while not self.is_done and not self.is_broken:
            step = self._state(text[at:])
            if step is None:
                break
            pieces.append(step[0])
            at += step[1]
        return "".join(pieces), at

    def flush(self, text: str) -> tuple[str, int]:
        """See `ArgumentsReader.flush`."""
        if self._state == self._string:
            return _escaped(text), len(text)
        if self._state == self._value:
            return text.strip(), len(text)
        if self._state == self._structure and self._json is not None and not self._json.is_done:
            return text, len(text)
        is_syntax = self._state != self._between or _TAG_BEGIN.may_begin(text) or _FUNCTION_END.may_begin(text)
        return "", len(text) if is_syntax else 0

    # States: each gives JSON and how many characters it took; None where more text is needed.

    def _between(self, text: str) -> tuple[str, int] | None:
        match = _PARAMETER.match(text)
        if match is not None:
            properties = self._root.get("properties", {})
            self._types = types_of(properties.get(match["key"]), self._root)
            piece = f"{self._separator}{json.dumps(match['key'], ensure_ascii=False)}: "
            self._separator, self._state = ", ", self._first_break
            return piece, match.end()
        match = _FUNCTION_END.match(text)
        if match is not None:
            self.is_done = True
            return "}", match.end()
        if _PARAMETER.may_begin(text) or _FUNCTION_END.may_begin(text):
            return None
        self.is_broken = True
        return "", 0

    def _first_break(self, text: str) -> tuple[str, int] | None:
        if not text:
            return None
        self._state = self._value
        return "", 1 if text[0] == "\n" else 0

    def _value(self, text: str) -> tuple[str, int] | None:
        """Decides of which type the value is."""
        scalars = self._types & {"number", "boolean", "null"}
        match = _SCALAR.match(text) if scalars else None
        if match is not None:
            word = None if match["word"] is None else _WORDS[match["word"]]
            if (_TYPES[word] if word else "number") in scalars:
                self._state = self._between
                return word or match["number"], match.end()
        elif scalars and _SCALAR.may_begin(text):
            return None
        inside = text.lstrip(" \t\r\n")
        if not inside and self._types & {"object", "array"} and _VALUE_END.may_begin(text):
            return None
        kind = {"{": "object", "[": "array"}.get(inside[:1])
        if kind in self._types:
            self._json, self._state = JSONReader(), self._structure
            return "", len(text) - len(inside)
        self._state = self._string
        return '"', 0

    def _structure(self, text: str) -> tuple[str, int] | None:
        assert self._json is not None
        if self._json.is_done:
            match = _VALUE_END.match(text)
            if match is not None:
                self._state = self._between
                return "", match.end()
            self.is_broken = not _VALUE_END.may_begin(text)
            return ("", 0) if self.is_broken else None
        piece, end = self._json.read(text)
        self.is_broken = self._json.is_broken
        return (piece, end) if end or self.is_broken else None

    def _string(self, text: str) -> tuple[str, int] | None:
        match, held = _STRING_END.find(text), _STRING_END.held(text)
        if match is not None and match.start() <= held:
            self._state = self._between
            return _escaped(text[: match.start()]) + '"', match.end()
        return (_escaped(text[:held]), held) if held else None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
