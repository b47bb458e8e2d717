"""Structured outputs: what a user asks of the form of an output, and the grammar that follows from it."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar_spec import STRUCTURAL_TAG, GrammarSpec, GrammarTag

_FORMS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form of an output: exactly one of `json`, `regex`, `choice`, `grammar`, `json_object` and `structural_tag`.

    Names are vLLM's. Raises `RequestError` for what is none of these forms, or more than one; whether the configured
    grammar plugin enforces all of a schema, or of a regular expression, is known once it has compiled it.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON Schema, as text or as data. Kept as text."""
    regex: str | None = None
    """The whole output matches it."""
    choice: Sequence[str] | None = None
    """The output is one of these strings."""
    grammar: str | None = None
    """A grammar in the notation of llama.cpp (GBNF, an EBNF whose rules have `::=`) with a rule `root`, else in that of
    Lark with a rule `start`."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Free text with JSON inside of tags, as data or JSON: {"structures": [{"begin", "schema", "end"}, ...],
    "triggers": [...]}, or {"type": "structural_tag", "format": {"type": "triggered_tags", ...}}."""
    max_whitespace: int | None = None
    """In JSON, most whitespace characters at each place that may have some; None: any number, 0: none."""
    starts_after: str | Sequence[int] = ()
    """Text, such as "</think>", or token ids: the output is free, ends of sequence excepted, until it has had them, and
    has the form from there on. Empty, or where the prompt ends with them: it has the form from the start."""
    spec: GrammarSpec = field(init=False, repr=False, compare=False)
    """The grammar."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        if isinstance(self.json, Mapping | bool):
            set_(self, "json", _as_text("json", self.json))
        if isinstance(self.structural_tag, Mapping):
            set_(self, "structural_tag", _as_text("structural_tag", self.structural_tag))
        if self.choice is not None:
            set_(self, "choice", _strings("choice", self.choice))
        if not isinstance(self.starts_after, str):
            set_(self, "starts_after", _token_ids(self.starts_after))
        given = [name for name in _FORMS if vars(self)[name] is not None and vars(self)[name] is not False]
        if len(given) != 1:
            raise RequestError(
                f"structured outputs have exactly one of {', '.join(_FORMS)}, got {', '.join(given) or 'none'}"
            )
        set_(self, "spec", self._spec(given[0]))

    def _spec(self, form: str) -> GrammarSpec:
        value = vars(self)[form]
        if form == "json_object":
            if value is not True:
                raise RequestError(f"json_object must be True or None, got {value!r}")
            return GrammarSpec(form="json_object", max_whitespace=self.max_whitespace)
        if form == "choice":
            return self._without_whitespace("choice", json_module.dumps(value))
        if not isinstance(value, str):
            raise RequestError(f"{form} of structured outputs must be text, got {value!r}")
        if form == "json":
            return GrammarSpec(form="json_schema", source=value, max_whitespace=self.max_whitespace)
        if form == "structural_tag":
            return _tags(value, self.max_whitespace)
        if form == "regex":
            return self._without_whitespace("regex", value)
        return self._without_whitespace("gbnf" if "::=" in value else "lark", value)

    def _without_whitespace(self, form: str, source: str) -> GrammarSpec:
        if self.max_whitespace is not None:
            raise RequestError(f"max_whitespace is of JSON, and the form {form} has none: leave it out")
        return GrammarSpec(form=form, source=source)


def _as_text(name: str, value: object) -> str:
    try:
        return json_module.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} of structured outputs cannot be written as JSON: {error}") from None


def _strings(name: str, values: object) -> tuple[str, ...]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise RequestError(f"{name} must be a list of strings, got {values!r}")
    found = tuple(values)
    if not found or not all(isinstance(value, str) for value in found):
        raise RequestError(f"{name} must be a list of strings, with at least one, got {values!r}")
    return found


def _token_ids(values: object) -> tuple[int, ...]:
    if isinstance(values, Sequence) and not isinstance(values, bytes):
        found = tuple(values)
        if all(isinstance(value, int) and not isinstance(value, bool) for value in found):
            return found
    raise RequestError(f"starts_after must be text or a list of token ids, got {values!r}")


def _tags(source: str, max_whitespace: int | None) -> GrammarSpec:
    try:
        given = json_module.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"structural_tag is not JSON: {error}") from None
    try:
        if "structures" in given:
            tags = [_tag(item, item["schema"], max_whitespace) for item in given["structures"]]
            return GrammarSpec(form=STRUCTURAL_TAG, tags=tuple(tags), triggers=tuple(given["triggers"]))
        tagged = given["format"]
        if tagged["type"] != "triggered_tags":
            raise RequestError(f"structural_tag: the format {tagged['type']!r} is not served, only triggered_tags")
        unknown = sorted(set(tagged) - {"type", "triggers", "tags", "at_least_one", "stop_after_first"})
        if unknown:
            raise RequestError(f"structural_tag: triggered_tags with {', '.join(unknown)} are not served")
        return GrammarSpec(
            form=STRUCTURAL_TAG,
            tags=tuple(_tag(item, _schema(item["content"]), max_whitespace) for item in tagged["tags"]),
            triggers=tuple(tagged["triggers"]),
            at_least_one=bool(tagged.get("at_least_one", False)),
            stop_after_first=bool(tagged.get("stop_after_first", False)),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"structural_tag has another shape than its form asks for ({type(error).__name__}: {error})"
        ) from None


def _schema(content: Mapping[str, Any]) -> Any:
    if content["type"] != "json_schema":
        raise RequestError(f"structural_tag: content of type {content['type']!r} is not served, only json_schema")
    return content["json_schema"]


def _tag(item: Mapping[str, Any], schema: Any, max_whitespace: int | None) -> GrammarTag:
    content = GrammarSpec(form="json_schema", source=_as_text("schema", schema), max_whitespace=max_whitespace)
    return GrammarTag(begin=item["begin"], content=content, end=item["end"])
