"""What is asked of a schema before a library sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dovetail.contracts.errors import RequestError
from dovetail.plugins.grammars.fragment import VOCABULARY, check_fragment
from dovetail.plugins.grammars.schemas import Vocabulary, read_schema

SMALL = Vocabulary(
    frozenset({"type", "properties", "items", "anyOf", "pattern", "maxLength", "format", "$ref", "enum", "const"}),
    frozenset({"date"}),
)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a/b": {"items": {"not": {}}}}}, "#/properties/a~1b/items/not"),
        ({"anyOf": [{}, {"type": "string", "maxLenght": 2}]}, "maxLenght is not enforced .do you mean maxLength"),
        ({"$defs": {"unused": {"oneOf": []}}}, r"#/\$defs/unused/oneOf"),
        ({"format": "time"}, "#/format"),
        ({"$ref": "other.json#/a"}, r"#/\$ref"),
        ({"pattern": "(a"}, "#/pattern.*character 1"),
        ({"properties": []}, "#/properties"),
        ({"items": 3}, "#/items"),
        ({"x-guidance": {"lenient": True}}, "#/x-guidance"),
    ],
)
def test_refusals_have_a_pointer(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestError, match=place):
        read_schema(json.dumps(schema), SMALL)


def test_values_and_annotations_are_no_schemas() -> None:
    schema = {
        "title": {"not": 1},
        "default": {"oneOf": 1},
        "enum": [{"not": 1}],
        "x-mine": {"if": 1},
        "const": {"a": 1},
    }
    assert read_schema(json.dumps(schema), SMALL)[0] == schema


def test_depth_is_bounded() -> None:
    deep = '{"items":' * 300 + "{}" + "}" * 300
    with pytest.raises(RequestError, match="200 levels"):
        read_schema(deep, SMALL)


@pytest.mark.parametrize(
    ("schema", "largest"),
    [
        ({"maxLength": 300}, 300),
        ({"anyOf": [{"pattern": "(a{20}){30}"}, {"maxLength": 5}]}, 600),
        ({"type": "null"}, 0),
    ],
)
def test_what_is_counted_up_to_is_found(schema: dict[str, Any], largest: int) -> None:
    assert read_schema(json.dumps(schema), SMALL)[1].largest == largest


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {"type": "integer"}}}, "#/minimum"),
        ({"anyOf": [{"type": "array"}], "maxItems": 3}, "#/maxItems"),
        ({"maxItems": 3}, "#/maxItems"),
        ({"type": "string", "minimum": 3}, "#/minimum"),
        ({"type": "number", "minimum": 3}, "#/minimum"),
        ({"$ref": "#name", "$defs": {"a": {"$anchor": "name", "type": "integer"}}}, r"#/\$ref"),
        ({"type": "object", "required": ["a"]}, "#/required"),
        ({"type": "array", "items": {"type": "what"}}, "#/items/type"),
    ],
)
def test_the_fragment_has_no_keyword_that_is_passed_over(schema: dict[str, Any], place: str) -> None:
    read_schema(json.dumps(schema), VOCABULARY)
    with pytest.raises(RequestError, match=place):
        check_fragment(schema)


def test_the_fragment_has_what_pydantic_writes() -> None:
    check_fragment(
        {
            "type": "object",
            "title": "Order",
            "properties": {
                "kind": {"enum": ["a", "b"], "type": "string"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "minItems": 1},
            },
            "$defs": {"Item": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0}}}},
            "required": ["kind", "items"],
        }
    )
