"""Descriptions of what an output must look like: what a user's request becomes, and grammar plugins compile."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from dovetail.contracts.errors import RequestError

STRUCTURAL_TAG = "structural_tag"
"""The form of `GrammarSpec.tags`."""

FORMS = {
    "json_schema": "JSON text of the type that a JSON Schema describes (draft 2020-12 where it names none)",
    "json_object": "any JSON object; no source",
    "regex": "text that a regular expression matches as a whole",
    "choice": "one of the strings of a JSON array",
    "lark": "a grammar in the notation of Lark, with a rule `start`",
    "gbnf": "a grammar in the notation of llama.cpp (GBNF), with a rule `root`",
    STRUCTURAL_TAG: "free text with grammars inside tags; no source, see `GrammarSpec.tags`",
}
"""The forms that `GrammarSpec` defines, with what the source is. A plugin may declare others, and defines them then.

Regular expressions are of what Python, Rust and ECMAScript have in common: literals, escapes, `.` (no line feed),
classes, groups that are or are not captured, `|`, and greedy `*`, `+`, `?`, `{m}`, `{m,}`, `{m,n}`. `\\d`, `\\w` and
`\\s` are of ASCII characters. `^` may be the first and `$` the last character, and is without effect there. The
`pattern` of a schema is of the same notation, but what it matches may be part of the text, as JSON Schema has it.
"""


@dataclass(frozen=True, kw_only=True)
class GrammarTag:
    """One kind of tagged section: `begin`, then what `content` describes, then `end`."""

    begin: str
    """Begins with one of the triggers of the spec."""
    content: GrammarSpec
    """Of any form but `structural_tag`."""
    end: str
    """May be empty."""


@dataclass(frozen=True, kw_only=True)
class GrammarSpec:
    """What an output must look like. Hashable, and pickles small: it travels from the engine to the worker.

    Raises `RequestError` where it cannot be: no form, a tag that no trigger begins, tags with another form.
    """

    form: str
    """One of `GrammarCapabilities.forms`."""
    source: str = ""
    """Text in the notation of the form, see `FORMS`."""
    max_whitespace: int | None = None
    """In JSON, most whitespace characters at each place that may have some, at least 0; None: any number. Models that
    write whitespace for ever are kept from it by a small number."""
    tags: tuple[GrammarTag, ...] = ()
    """Of form `structural_tag`: the text is free up to a trigger; from there on it must be one of the tags that begin
    with this trigger, and is free again behind it. Which trigger: the one that is complete first."""
    triggers: tuple[str, ...] = ()
    """Text that cannot occur outside of a tag. In a trigger, `begin` and `end`, names of the tokenizer's special tokens
    stand for these."""
    at_least_one: bool = False
    """Of form `structural_tag`: the text may not end before the first tag."""
    stop_after_first: bool = False
    """Of form `structural_tag`: the text ends behind the first tag."""

    def __post_init__(self) -> None:
        if not self.form:
            raise RequestError("a grammar needs a form, such as json_schema or regex")
        if self.max_whitespace is not None and self.max_whitespace < 0:
            raise RequestError(f"max_whitespace of a grammar is 0 or more, not {self.max_whitespace}")
        if self.form != STRUCTURAL_TAG:
            if self.tags or self.triggers or self.at_least_one or self.stop_after_first:
                raise RequestError(f"a grammar of form {self.form} has no tags: they need the form {STRUCTURAL_TAG}")
            return
        if not self.tags or not all(self.triggers):
            raise RequestError("structural tags need at least one tag, and triggers that are not empty")
        if self.source or self.max_whitespace is not None:
            raise RequestError("of structural tags each tag has its own source and max_whitespace")
        for tag in self.tags:
            if tag.content.form == STRUCTURAL_TAG:
                raise RequestError(f"tag {tag.begin!r}: tags cannot be nested")
            if not tag.begin.startswith(self.triggers):
                raise RequestError(f"tag {tag.begin!r} begins with none of the triggers {list(self.triggers)}")

    @property
    def forms(self) -> frozenset[str]:
        """Its own form, and those of what is inside of its tags."""
        return frozenset({self.form, *(tag.content.form for tag in self.tags)})

    @property
    def name(self) -> str:
        """64 hexadecimal digits: equal specs have equal names, in every process."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class OutputGrammar:
    """What one request asks of its output; the host's own record, which plugins do not see."""

    spec: GrammarSpec
    starts_after: tuple[int, ...] = ()
    """Token ids that the output has before the grammar begins: up to the last of them, every token but ends of
    sequence is legal. Empty: it begins with the first token."""
