"""What a form asks for: how many fields it has, and how far they are filled, be it `"%5d"`, `"{:>5}"` or a date's."""

from __future__ import annotations

import re
import string
from typing import NamedTuple

NO_END = 2**62
"""Characters of a field whose width is an argument, or has more digits than any text."""
_MOST_DIGITS = 18
_NUMBER = re.compile(r"\d+")
_BRACKET = re.compile(r"[()]")
_FIELD = re.compile(r"[-+ #0]*(?P<width>\*|[0-9]+)?(?:\.(?P<precision>\*|[0-9]+)?)?[hlL]?")
"""What stands behind "%" and the key, without the letter."""


class Form(NamedTuple):
    """What a form asks for."""

    num_fields: int
    filled: int
    """Characters that widths and precisions ask for, all fields together."""
    reaches: bool = False
    """Whether a field names an attribute, so that its size is not that of an argument."""


def read_percents(text: str) -> Form:
    """A form for the operator `%`. As Python reads it, and in one pass."""
    num_fields = filled = 0
    start = text.find("%")
    while start >= 0:
        field = _FIELD.match(text, _behind_key(text, start + 1))
        assert field is not None  # all of it is optional
        num_fields += 1
        filled += sum(_number(part) for part in field.groups() if part)
        start = text.find("%", field.end() + 1)
    return Form(num_fields, filled)


def _behind_key(text: str, start: int) -> int:
    """Where the `(key)` that may stand at `start` ends."""
    depth = 0
    for bracket in _BRACKET.finditer(text, start) if text.startswith("(", start) else ():
        depth += 1 if bracket.group() == "(" else -1
        if depth == 0:
            return bracket.end()
    return len(text) if depth else start


def read_braces(text: str) -> Form:
    """A form for `str.format`."""
    num_fields = filled = 0
    reaches = False
    try:
        for _, name, spec, _ in string.Formatter().parse(text):
            num_fields += name is not None
            reaches |= "." in (name or "")
            filled += NO_END if "{" in (spec or "") else _numbers(spec or "")
    except ValueError:
        pass  # Formatting fails at the same place.
    return Form(num_fields, filled, reaches)


def read_date(text: str) -> Form:
    """A form for `strftime`. Any number may be a width: Python puts texts into the form before C's library reads it."""
    return Form(text.count("%"), _numbers(text))


def _numbers(text: str) -> int:
    return sum(map(_number, _NUMBER.findall(text)))


def _number(digits: str) -> int:
    return NO_END if digits == "*" or len(digits) > _MOST_DIGITS else int(digits)
