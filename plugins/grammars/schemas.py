"""JSON Schemas before a library sees them: every keyword is one that it enforces, or the schema is refused.

Libraries pass over keywords that they do not know; a schema whose `maxLenght` nobody reads would promise too much.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from dovetail.contracts.errors import RequestError
from dovetail.plugins.grammars.patterns import read_pattern

ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "$anchor", "$comment", "$defs", "definitions"),
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        # OpenAPI's: it says which branch of a oneOf is meant, and forbids nothing by itself.
        "discriminator",
    }
)
"""Keywords that no value can violate."""
MOST_LEVELS = 200
"""Of nesting: Python, and the libraries, read schemas recursively."""

_ONE = frozenset(
    {
        *("additionalProperties", "items", "additionalItems", "propertyNames", "contains", "not", "if", "then", "else"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_ARRAYS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "required", "enum"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SIZES = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "multipleOf"})

_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})


@dataclass(frozen=True)
class Vocabulary:
    """What a library enforces."""

    keywords: frozenset[str]
    formats: frozenset[str]


@dataclass
class SchemaFacts:
    """What a schema would have a library count up to."""

    largest: float = 0
    """The largest bound of lengths and counts, divisor, or product of a pattern's repetitions."""


def read_schema(source: str, vocabulary: Vocabulary) -> tuple[Any, SchemaFacts]:
    """The schema that is written there. Raises `RequestError` for what is not JSON, and for what is not enforced."""
    try:
        schema = json.loads(source)
    except ValueError as error:
        raise RequestError(f"the schema is not JSON: {error}") from None
    except RecursionError:
        raise RequestError(f"the schema is nested more than {MOST_LEVELS} levels deep") from None
    facts = SchemaFacts()
    _check(schema, "#", 0, vocabulary, facts)
    return schema, facts


def _check(schema: Any, where: str, level: int, vocabulary: Vocabulary, facts: SchemaFacts) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        _refuse(where, f"a schema is an object, true or false, not {json.dumps(schema)[:40]}")
    if level > MOST_LEVELS:
        _refuse(where[:60], f"schemas are nested at most {MOST_LEVELS} levels deep")
    for keyword, value in schema.items():
        place = f"{where}/{_escaped(keyword)}"
        if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
            if keyword not in _MAPS:
                continue
        elif keyword not in vocabulary.keywords:
            _refuse(place, _unknown(keyword, vocabulary))
        _look_at(keyword, value, place, vocabulary, facts)
        for name, inner in _inner(keyword, value, place):
            _check(inner, f"{place}{name}", level + 1, vocabulary, facts)


def _look_at(keyword: str, value: Any, place: str, vocabulary: Vocabulary, facts: SchemaFacts) -> None:
    """What the value of one keyword has to be, as far as a mistake would not be found later."""
    if keyword in _ARRAYS and not isinstance(value, list):
        _refuse(place, f"has an array, not {json.dumps(value)[:40]}")
    if keyword in _ARRAYS and keyword != "required" and not value:
        _refuse(place, "is empty, so that no value is valid")
    if keyword in _SIZES | _BOUNDS and (not isinstance(value, int | float) or isinstance(value, bool)):
        _refuse(place, f"has a number, not {json.dumps(value)[:40]}")
    if keyword == "required" and not all(isinstance(name, str) for name in value):
        _refuse(place, "has an array of strings")
    if keyword == "format" and not (isinstance(value, str) and value in vocabulary.formats):
        _refuse(place, f"the format {value!r} is not enforced; {', '.join(sorted(vocabulary.formats)) or 'none'} are")
    if keyword == "$ref" and not (isinstance(value, str) and value.startswith("#")):
        _refuse(place, f"refers to another document ({value!r}): copy it into $defs")
    if keyword in _SIZES:
        facts.largest = max(facts.largest, abs(value))
    patterns = [value] if keyword == "pattern" else list(value) if keyword == "patternProperties" else []
    for pattern in patterns:
        if not isinstance(pattern, str):
            _refuse(place, "has a regular expression")
        try:
            facts.largest = max(facts.largest, read_pattern(pattern).repeats)
        except RequestError as error:
            _refuse(place, str(error))


def _inner(keyword: str, value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The schemas that a keyword has, with the end of the pointer to each."""
    if keyword in _MAPS:
        if not isinstance(value, Mapping):
            _refuse(place, "has an object of schemas")
        for name, inner in value.items():
            yield f"/{_escaped(name)}", inner
    elif keyword in _LISTS and isinstance(value, list):
        for index, inner in enumerate(value):
            yield f"/{index}", inner
    elif keyword in _ONE:
        yield "", value


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all within it that are objects. It was checked by `read_schema`."""
    if isinstance(schema, dict):
        yield schema
        for keyword, value in schema.items():
            for _, inner in _inner(keyword, value, ""):
                yield from subschemas(inner)


def _unknown(keyword: str, vocabulary: Vocabulary) -> str:
    nearest = get_close_matches(keyword, vocabulary.keywords | ANNOTATIONS, 1)
    hint = f" (do you mean {nearest[0]}?)" if nearest else ""
    return f"the keyword {keyword} is not enforced{hint}: leave it out, or say in the prompt what it asks"


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _refuse(where: str, why: str) -> NoReturn:
    raise RequestError(f"schema, {where}: {why}")
