"""Regular expressions as the contract has them: what is no part of the notation is refused, with its place.

Libraries differ in what they make of the rest (lookarounds, back references, inline flags, lazy quantifiers), and some
pass over it in silence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from dovetail.contracts.errors import RequestError

MOST_REPEATS = 10_000
"""Largest number in braces."""
_NUMBERS = re.compile(r"[{~]\s*(\d{0,9})\s*(?:(?:,|\.\.)\s*(\d{0,9}))?", re.ASCII)
_SHORTHANDS = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v"}
_CONTROLS = "nrtfv"
_HEX = {"x": 2, "u": 4}
_BOUNDS = re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}", re.ASCII)


@dataclass(frozen=True)
class Pattern:
    """A regular expression that was read."""

    text: str
    r"""Without anchors at its ends, and with classes in place of `.`, `\d`, `\w`, `\s` and their opposites."""
    repeats: int
    """The product of all bounds: no smaller than what the nesting of repetitions multiplies up to."""


def read_pattern(source: str, never: str = "") -> Pattern:
    """Raises `RequestError` where the source is wrong or of another notation. `never`: what no class with `^` matches,
    as it is written within a class."""
    reader = _Reader(source, never)
    reader.alternatives(depth=0)
    if reader.at < reader.end:
        reader.refuse("has no opening parenthesis")
    return Pattern("".join(reader.parts), reader.repeats)


def repeats_in_rules(source: str) -> int:
    """The product of all bounds of repetitions in a grammar of rules (`{m,n}`, `~m..n`), its literals included: no
    smaller than what the nesting of repetitions multiplies up to."""
    product = 1
    for found in _NUMBERS.finditer(source):
        product *= max(1, *(int(number) for number in found.groups() if number))
    return product


class _Reader:
    def __init__(self, source: str, never: str):
        self.source = source
        self.never = never
        self.at = 1 if source.startswith("^") else 0
        self.end = len(source) - 1 if _ends_with_anchor(source) else len(source)
        self.parts: list[str] = []
        self.repeats = 1

    def refuse(self, why: str) -> NoReturn:
        shown = self.source[self.at : self.at + 12]
        raise RequestError(f"regular expression, character {self.at + 1}: {shown!r} {why}")

    def alternatives(self, depth: int) -> None:
        """Up to the end, or to the parenthesis that closes the group."""
        if depth > 200:
            self.refuse("is nested too deeply: 200 groups at most")
        can_repeat = False
        while self.at < self.end:
            char = self.source[self.at]
            if char == ")":
                return
            if char in "*+?{":
                if not can_repeat:
                    self.refuse("repeats nothing that can be repeated (lazy and possessive repetitions are not served)")
                self._repetition()
                can_repeat = False
                continue
            can_repeat = char != "|"
            if char == "(":
                self._group(depth)
            elif char == "[":
                self._class()
            elif char == "\\":
                self.parts.append(self._escape(in_class=False))
            elif char in "^$":
                self.refuse("is not served: anchors may only be the first and the last character")
            elif char in "]}":
                self.refuse("needs a backslash before it")
            elif char == ".":
                self.at += 1
                self.parts.append(f"[^{self.never}\\n]")
            else:
                self._copy(1)

    def _copy(self, count: int) -> None:
        self.parts.append(self.source[self.at : self.at + count])
        self.at += count

    def _repetition(self) -> None:
        if self.source[self.at] != "{":
            self._copy(1)
            return
        bounds = _BOUNDS.match(self.source, self.at, self.end)
        if bounds is None:
            self.refuse("is no repetition: write {m}, {m,} or {m,n}, or a backslash before the brace")
        least = int(bounds[1])
        most = least if bounds[2] is None else int(bounds[3]) if bounds[3] else None
        if most is not None and most < least:
            self.refuse("ends before it begins")
        if max(least, most or 0) > MOST_REPEATS:
            self.refuse(f"repeats too often: {MOST_REPEATS} times at most")
        self.repeats *= max(least, most or 0, 1)
        self._copy(len(bounds[0]))

    def _group(self, depth: int) -> None:
        opened = self.at
        if self.source.startswith("(?", self.at) and not self.source.startswith("(?:", self.at):
            self.refuse("is not served: groups are (...) or (?:...)")
        self.parts.append("(?:")
        self.at += 3 if self.source.startswith("(?:", self.at) else 1
        self.alternatives(depth + 1)
        if self.at >= self.end:
            self.at = opened
            self.refuse("is not closed")
        self._copy(1)

    def _class(self) -> None:
        opened = self.at
        if self.source.startswith("[^", self.at):
            self._copy(2)
            self.parts.append(self.never)
        else:
            self._copy(1)
        if self.source.startswith("]", self.at):
            self.refuse("is an empty class, or needs a backslash before it")
        while self.at < self.end and self.source[self.at] != "]":
            char = self.source[self.at]
            if char == "\\":
                self.parts.append(self._escape(in_class=True))
            elif char == "[" or self.source.startswith(("&&", "--", "~~", "||"), self.at):
                self.refuse("needs a backslash before it within a class")
            else:
                self._copy(1)
        if self.at >= self.end:
            self.at = opened
            self.refuse("is not closed")
        self._copy(1)

    def _escape(self, *, in_class: bool) -> str:
        """What stands for an escape; steps over it."""
        char = self.source[self.at + 1 : min(self.at + 2, self.end)]
        if (lower := char.lower()) in _SHORTHANDS and char:
            if in_class and char != lower:
                self.refuse("is not served within a class")
            self.at += 2
            inner = _SHORTHANDS[lower]
            return inner if in_class else f"[^{self.never}{inner}]" if char != lower else f"[{inner}]"
        if char in _HEX:
            digits = self.source[self.at + 2 : min(self.at + 2 + _HEX[char], self.end)]
            if len(digits) != _HEX[char] or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                self.refuse(f"needs {_HEX[char]} hexadecimal digits")
            if 0xD800 <= int(digits, 16) < 0xE000:
                self.refuse("is half of a character")
            self.at += 2 + len(digits)
            return f"\\x{digits}" if char == "x" else re.escape(chr(int(digits, 16)))
        if not char or (char.isalnum() and char not in _CONTROLS) or not char.isascii():
            self.refuse("is not served: back references, boundaries and classes by name have no place in grammars")
        self.at += 2
        return f"\\{char}" if char in _CONTROLS else re.escape(char)


def _ends_with_anchor(source: str) -> bool:
    before = source[:-1]
    return source.endswith("$") and (len(before) - len(before.rstrip("\\"))) % 2 == 0
