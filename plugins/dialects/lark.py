"""Grammars in the part of Lark that llguidance and xgrammar share; see `Dialect.grammar`.

Free text is a regular expression that leaves no room for a marker, rather than a lazy rule or a negation, which not all
engines have. All markers of a text begin with one character that comes in none of them again, so text without them is
pieces between those characters, none of which goes on like a marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dovetail.contracts.dialect import DialectRequest, Tool

ANY_TEXT = r"(.|\n)*"
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def text_without(markers: Iterable[str], *, spaced: bool = False) -> str:
    """A regular expression of the texts that have none of the markers in them. `spaced`: nor any with white space
    behind its first character."""
    markers = sorted(set(markers))
    if not markers:
        return ANY_TEXT
    first = markers[0][0]
    tails = [marker[1:] for marker in markers]
    if any(marker[0] != first or first in marker[1:] for marker in markers):
        raise ValueError(f"markers must begin with one character that is nowhere else in them: {markers}")
    others = f"[^{_in_class(first)}]"
    space = r" \t\r\n" if spaced else ""
    gap = f"[{space}]*" if spaced else ""
    return f"{others}*({_in_regex(first)}{gap}{_not_beginning(tails, first, space)})*"


def _not_beginning(tails: Sequence[str], first: str, space: str = "") -> str:
    """Texts without `first` that begin with none of `tails`, nor with `space`."""
    heads = sorted({tail[0] for tail in tails})
    others = f"[^{_in_class(first)}]"
    choices = [f"[^{''.join(map(_in_class, sorted({first, *heads})))}{space}]{others}*"]
    for head in heads:
        rest = [tail[1:] for tail in tails if tail[0] == head]
        if "" not in rest:
            choices.append(_in_regex(head) + _not_beginning(rest, first))
    return f"({'|'.join(choices)})?"


def _in_regex(char: str) -> str:
    return "\\" + char if re.match(r"[\\/.+*?()|{}\[\]^$-]", char) else {"\n": "\\n"}.get(char, char)


def _in_class(char: str) -> str:
    return "\\" + char if char in r"\/[]^-" else {"\n": "\\n"}.get(char, char)


def json_rule(schema: Mapping[str, Any]) -> str:
    """An expression for JSON that fits a schema."""
    return f"%json {json.dumps(schema)}"


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """What a grammar asks of a tool's arguments."""
    return tool.parameters if tool.strict and tool.parameters is not None else ANY_OBJECT


class Writer:
    """Collects the rules of one grammar."""

    def __init__(self, special_tokens: Mapping[str, int]):
        self._special_tokens = special_tokens
        self._rules: list[str] = []

    def rule(self, name: str, body: str) -> str:
        """Adds a rule, or a terminal where the name is in capitals; returns its name."""
        self._rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """The text, with the special tokens in it as tokens."""
        pieces = [text]
        if self._special_tokens:
            pieces = re.split(
                f"({'|'.join(map(re.escape, sorted(self._special_tokens, key=len, reverse=True)))})", text
            )
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def _piece(self, text: str) -> str:
        if text in self._special_tokens:
            return f"<[{self._special_tokens[text]}]>"
        return _quoted(text)

    def text_to(self, name: str, marker: str, text: str = "", before: str = "") -> str:
        """Adds free text and the marker that ends it; returns its name. One terminal if it can be, since lexers are
        greedy. `text`: a regular expression, by default of all that has no such marker in it. `before`: a marker that
        it begins with."""
        text = f"/{text or text_without([marker])}/"
        if marker in self._special_tokens or before in self._special_tokens:
            own = self.rule(
                f"{name.upper()}_TEXT", text if marker in self._special_tokens else f"{text} {_quoted(marker)}"
            )
            end = self.literal(marker) if marker in self._special_tokens else ""
            return self.rule(name, f"{self.literal(before)} {own} {end}".strip())
        return self.rule(name.upper(), f"{self.literal(before)} {text} {self.literal(marker)}".strip())

    def done(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules, ""])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def is_free(request: DialectRequest) -> bool:
    """Whether nothing in the request binds what the model writes."""
    tools = called_tools(request)
    binds_calls = bool(tools) and (
        request.choice.mode != "auto"
        or not request.choice.parallel
        or request.choice.allowed
        or any(tool.strict for tool in tools)
    )
    return request.response_format is None and not binds_calls


def called_tools(request: DialectRequest) -> Sequence[Tool]:
    """The tools that may be called."""
    if request.choice.mode == "none":
        return ()
    if request.choice.mode == "named":
        return [tool for tool in request.tools if tool.name == request.choice.name]
    return [tool for tool in request.tools if not request.choice.allowed or tool.name in request.choice.allowed]


def has_many(request: DialectRequest) -> bool:
    """Whether there may be several calls."""
    return request.choice.parallel and request.choice.mode != "named"
