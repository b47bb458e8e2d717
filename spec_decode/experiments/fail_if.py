"""Expressions of `--fail-if`: comparisons of named results, joined by and, or, not. Nothing else can be said, so
nothing else can happen."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.commands.checks import nearest
from dovetail.contracts.errors import ConfigError
from dovetail.spec_decode.experiments.report import Row

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)|(?P<name>[A-Za-z_][A-Za-z0-9_.]*)"
    r"|(?P<text>'[^']*'|\"[^\"]*\")|(?P<sign><=|>=|==|!=|<|>|\(|\)|-))"
)
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "none": None, "None": None}
_WORDS = ("and", "or", "not")
_ORDER: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}

Evaluate = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Failure:
    """A row of the results for which the expression holds."""

    label: str
    values: Mapping[str, Any]
    """Of the names that the expression mentions."""


class Condition:
    """A parsed expression.

    Grammar: `or` of `and` of `not` of comparisons `a < b` (also <=, >, >=, ==, !=) of names, numbers, 'texts', true,
    false and none, with parentheses. A comparison by size with something that could not be measured (none) holds, since
    what must be shown was not; == and != compare it as it is.
    """

    def __init__(self, text: str):
        self.text = text
        self.names: list[str] = []
        self._tokens = _tokenize(text)
        self._place = 0
        self._evaluate = self._parse_or()
        if self._place < len(self._tokens):
            raise self._error(f"{self._tokens[self._place][1]!r} is one thing too many")

    def check_names(self, known: Sequence[str]) -> None:
        """Raises `ConfigError` for a name that no result has, with the nearest."""
        for name in self.names:
            if name not in known:
                raise ConfigError(f"--fail-if {self.text!r}: there is no result {name!r}; {nearest(name, known)}")

    def failures(self, rows: Sequence[Row]) -> list[Failure]:
        """Rows for which it holds."""
        found = []
        for row in rows:
            self.check_names(list(row.values))
            if self._evaluate(row.values):
                found.append(Failure(row.label, {name: row.values[name] for name in dict.fromkeys(self.names)}))
        return found

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f'--fail-if {self.text!r}: {problem}; write as in "lossless == false or speedup.low < 1.0"')

    def _next(self) -> tuple[str, str]:
        return self._tokens[self._place] if self._place < len(self._tokens) else ("end", "the end")

    def _take(self, *words: str) -> str | None:
        kind, word = self._next()
        if kind in ("name", "sign") and word in words:
            self._place += 1
            return word
        return None

    def _parse_or(self) -> Evaluate:
        parts = [self._parse_and()]
        while self._take("or"):
            parts.append(self._parse_and())
        return parts[0] if len(parts) == 1 else lambda values: any(part(values) for part in parts)

    def _parse_and(self) -> Evaluate:
        parts = [self._parse_not()]
        while self._take("and"):
            parts.append(self._parse_not())
        return parts[0] if len(parts) == 1 else lambda values: all(part(values) for part in parts)

    def _parse_not(self) -> Evaluate:
        if self._take("not"):
            part = self._parse_not()
            return lambda values: not part(values)
        return self._parse_comparison()

    def _parse_comparison(self) -> Evaluate:
        left = self._parse_value()
        sign = self._take(*_ORDER, "==", "!=")
        if sign is None:
            return left
        right = self._parse_value()
        return lambda values: self._compare(left(values), sign, right(values))

    def _compare(self, left: Any, sign: str, right: Any) -> bool:
        if sign in ("==", "!="):
            return (left == right) == (sign == "==")
        if left is None or right is None:
            return True
        if isinstance(left, str) != isinstance(right, str):
            raise self._error(f"{left!r} {sign} {right!r} compares a text with a number")
        return _ORDER[sign](left, right)

    def _parse_value(self) -> Evaluate:
        kind, word = self._next()
        self._place += 1
        if kind == "sign" and word == "(":
            inner = self._parse_or()
            if self._take(")") is None:
                raise self._error("a closing parenthesis is missing")
            return inner
        if kind == "sign" and word == "-" and self._next()[0] == "number":
            self._place += 1
            number = -float(self._tokens[self._place - 1][1])
            return lambda _: number
        if kind == "number":
            value: Any = float(word)
        elif kind == "text":
            value = word[1:-1]
        elif kind == "name" and word in _CONSTANTS:
            value = _CONSTANTS[word]
        elif kind == "name" and word not in _WORDS:
            self.names.append(word)
            return lambda values: values[word]
        else:
            raise self._error(f"a name or a value is missing before {word!r}" if kind != "end" else "it breaks off")
        return lambda _: value


def _tokenize(text: str) -> list[tuple[str, str]]:
    tokens = []
    place = 0
    while text[place:].strip():
        match = _TOKEN.match(text, place)
        if match is None:
            raise ConfigError(f"--fail-if {text!r}: {text[place:].strip()[0]!r} means nothing here")
        kind = match.lastgroup or ""
        tokens.append((kind, match[kind]))
        place = match.end()
    return tokens
