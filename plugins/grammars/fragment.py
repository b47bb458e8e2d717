"""The part of JSON Schema that xgrammar enforces as it is written.

The library looks at one keyword of a schema and passes over others beside it (`minimum` beside `$ref`, say), treats a
`oneOf` as an `anyOf` where it cannot tell, and drops what it has no grammar for, with a line in the log at most. Its
strings of a given length may have control characters, so that the output is no JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from dovetail.contracts.errors import RequestError
from dovetail.plugins.grammars.schemas import ANNOTATIONS, Vocabulary

_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_BY_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"format"}),
    "integer": _NUMBERS,
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
_WHOLE = frozenset({"$ref", "const", "enum", "anyOf"})
"""Each says all by itself."""
VOCABULARY = Vocabulary(
    keywords=frozenset({"type", *_WHOLE, *(keyword for own in _BY_TYPE.values() for keyword in own)}),
    formats=frozenset({"date", "uuid", "ipv4"}),
)


def check_fragment(schema: Any, where: str = "#") -> None:
    """Of a schema of known keywords. Raises `RequestError` for what the library would pass over, with its place."""
    if isinstance(schema, bool):
        return
    keywords = {keyword for keyword in schema if keyword not in ANNOTATIONS and not keyword.startswith("x-")}
    reference = schema.get("$ref", "#")
    if reference != "#" and not reference.startswith("#/"):
        _refuse(f"{where}/$ref", f"{reference!r} is passed over: refer to it by a JSON pointer, such as #/$defs/name")
    if whole := sorted(keywords & _WHOLE):
        _check_whole(schema, whole[0], keywords - {whole[0]}, where)
    elif keywords:
        _check_types(schema, keywords - {"type"}, where)
    for name, inner in _children(schema):
        check_fragment(inner, f"{where}/{name}")


def _check_whole(schema: Mapping[str, Any], keyword: str, others: set[str], where: str) -> None:
    if keyword in ("const", "enum"):
        # What pydantic writes: the type of the values, once more.
        others = others - {"type"}
    if others:
        _refuse(f"{where}/{min(others)}", f"is passed over with {keyword} in the same schema: leave one out")


def _check_types(schema: Mapping[str, Any], keywords: set[str], where: str) -> None:
    named = schema.get("type")
    types = named if isinstance(named, list) else [named]
    if named is None:
        _refuse(f"{where}/{min(keywords)}", "is passed over in a schema without type: say which type it is for")
    served: set[str] = set()
    for name in types:
        if not isinstance(name, str) or name not in _BY_TYPE:
            _refuse(f"{where}/type", f"{name!r} is no type: {', '.join(sorted(_BY_TYPE))} are")
        served |= _BY_TYPE[name]
    if unserved := keywords - served:
        _refuse(f"{where}/{min(unserved)}", f"is not enforced for {json.dumps(named)}")
    if unnamed := sorted(set(schema.get("required", ())) - set(schema.get("properties", ()))):
        _refuse(f"{where}/required", f"{unnamed[0]!r} is passed over, since it is not among the properties")


def _children(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for keyword in ("properties", "$defs", "definitions"):
        found += [(f"{keyword}/{name}", inner) for name, inner in schema.get(keyword, {}).items()]
    for keyword in ("anyOf", "prefixItems"):
        found += [(f"{keyword}/{index}", inner) for index, inner in enumerate(schema.get(keyword, []))]
    found += [(keyword, schema[keyword]) for keyword in ("items", "additionalProperties") if keyword in schema]
    return found


def _refuse(where: str, why: str) -> NoReturn:
    raise RequestError(f"schema, {where}: {why}")
