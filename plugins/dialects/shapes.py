"""Shapes of text that comes in pieces: a regular expression that also knows what may still become a match.

head = seq(lit("<call>"), SPACE, json_string("name"))
Shape(head).find('text <call> "add"')      the match, from 5 to the end
Shape(head).held('text <call> "a')         5: from there on it may become one
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dovetail.contracts.dialect import MAX_HEAD


@dataclass(frozen=True)
class Part:
    """Two regular expressions: of a whole match, and of all that can begin one, the empty text included."""

    whole: str
    begun: str


def lit(text: str) -> Part:
    """The text itself."""
    begun = ""
    for char in reversed(text[:-1]):
        begun = f"(?:{re.escape(char)}{begun})?"
    return Part(re.escape(text), begun)


def many(chars: str) -> Part:
    """Any number of characters of a class."""
    return Part(f"{chars}*", f"{chars}*")


def seq(*parts: Part) -> Part:
    """One after the other."""
    whole, begun = parts[-1].whole, parts[-1].begun
    for part in reversed(parts[:-1]):
        begun = f"(?:{part.whole}(?:{begun})|{part.begun})"
        whole = part.whole + whole
    return Part(whole, begun)


def alt(*parts: Part) -> Part:
    """One of them, the first that matches."""
    return Part(f"(?:{'|'.join(p.whole for p in parts)})", f"(?:{'|'.join(p.begun for p in parts)})")


def opt(part: Part) -> Part:
    """The part or nothing."""
    return Part(f"(?:{part.whole})?", part.begun)


def group(name: str, chars: str) -> Part:
    """At least one character of a class, kept under a name."""
    return Part(f"(?P<{name}>{chars}+)", f"{chars}*")


def json_string(name: str) -> Part:
    """A JSON string, kept under a name as it is written, without its quotes."""
    return Part(rf'"(?P<{name}>(?:[^"\\\x00-\x1f]|\\.)*)"', r'(?:"(?:[^"\\\x00-\x1f]|\\.)*\\?)?')


SPACE = many(r"[ \t\r\n]")
_OTHER = "\ue000"
LINE_BREAK = Part(r"\n?", r"\n?")


class Shape:
    """A part to be looked for in text of which more may come. A match must not end in something optional, or it would
    hang on what comes next."""

    def __init__(self, part: Part):
        self._whole = re.compile(part.whole)
        self._begun = re.compile(f"(?:{re.sub(r'[(][?]P<[a-z_]+>', '(?:', part.begun)})\\Z")

        # Of all other characters, one that no marker has stands for those outside ASCII.
        chars = sorted({*map(chr, range(128)), *part.whole, _OTHER})
        self._first = frozenset(char for char in chars if self._begun.match(char) is not None)

    def may_be_in(self, text: str) -> bool:
        """Whether a match may begin anywhere in the text: quick, and no for most of what models write."""
        return _OTHER in self._first or not self._first.isdisjoint(text)

    def find(self, text: str) -> re.Match[str] | None:
        """The first match."""
        match = self._whole.search(text)
        while match is not None and match.end() - match.start() > MAX_HEAD:
            match = self._whole.search(text, match.start() + 1)
        return match

    def held(self, text: str) -> int:
        """Where that begins which may become a match; the length of the text where nothing may."""
        found = self._begun.search(text, max(0, len(text) - MAX_HEAD))
        assert found is not None, "nothing at all begins every match"
        return found.start()

    def match(self, text: str) -> re.Match[str] | None:
        """The match at the begin of the text."""
        match = self._whole.match(text)
        return None if match is None or match.end() > MAX_HEAD else match

    def may_begin(self, text: str) -> bool:
        """Whether all of the text begins a match."""
        return len(text) <= MAX_HEAD and self._begun.match(text) is not None
