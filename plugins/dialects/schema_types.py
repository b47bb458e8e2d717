"""Which JSON types a schema allows, for dialects whose text has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALL_TYPES = frozenset({"string", "number", "boolean", "null", "object", "array"})
_DEEPEST = 20
_DEFINITIONS = ("$defs", "definitions")


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types that a value may have, integers as numbers. A schema that says nothing of types allows strings."""
    found = _types(schema, root, depth)
    return frozenset({"string"}) if found is None else found


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    """None: the schema says nothing of types."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return None
    kinds = schema.get("type")
    if kinds is not None:
        names = [kinds] if isinstance(kinds, str) else kinds
        return frozenset("number" if name == "integer" else name for name in names) & ALL_TYPES
    if "enum" in schema or "const" in schema:
        return frozenset(map(_type_of, schema.get("enum", [schema.get("const")])))
    if isinstance(schema.get("$ref"), str):
        return _types(_resolved(schema["$ref"], root), root, depth + 1)
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return frozenset().union(*(types_of(item, root, depth + 1) for item in schema[keyword]))
    for item in schema.get("allOf", ()):
        found = _types(item, root, depth + 1)
        if found is not None:
            return found
    return None


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema, with what its references point to."""
    definitions = {name: root[name] for name in _DEFINITIONS if name in root}
    return {**definitions, **schema} if isinstance(schema, Mapping) else definitions


def _resolved(reference: str, root: Any) -> Any:
    found: Any = root
    for name in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = {str: "string", int: "number", float: "number", list: "array"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "object")
