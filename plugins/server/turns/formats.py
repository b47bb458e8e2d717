"""Response formats as expressions of a dialect's grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.route import APIError
from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.plugins.dialects.lark import json_rule

ANY_OBJECT = json_rule({"type": "object"})


def format_expression(response_format: Mapping[str, Any] | None, param: str = "response_format") -> str | None:
    """Of OpenAI's `response_format`: None for text. Raises `APIError` 400 for other types than text, json_object and
    json_schema."""
    kind = response_format.get("type") if response_format is not None else "text"
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        message = f"{param}.type is text, json_object or json_schema, not {kind!r}"
        raise APIError(400, message, param=f"{param}.type")
    # Chat wraps the schema in an object, responses do not.
    wrapped = response_format.get("json_schema", response_format)
    schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
    if schema is None:
        return ANY_OBJECT
    return schema_expression(schema, f"{param}.json_schema.schema")


def schema_expression(schema: Any, param: str) -> str:
    """JSON of a schema, which is given as data or as text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise APIError(400, f"{param} is no JSON: {error}", param=param) from None
    if not isinstance(schema, Mapping):
        raise APIError(400, f"{param} must be a JSON schema", param=param)
    return json_rule(schema)


def choice_expression(choices: Sequence[str]) -> str:
    """One of some texts."""
    return f"({' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)})"


def form_of(expression: str) -> StructuredOutputs | None:
    """The form that an expression of `schema_expression` says; None for others."""
    head = "%json "
    return StructuredOutputs(json=expression.removeprefix(head)) if expression.startswith(head) else None


def expression_of(asked: StructuredOutputs) -> str | None:
    """Of structured outputs that an expression says as exactly, so that they go with reasoning and calls; None for
    others."""
    if asked.max_whitespace is not None or asked.starts_after:
        return None
    if asked.json_object:
        return ANY_OBJECT
    if asked.choice is not None:
        return choice_expression(asked.choice)
    schema = json.loads(asked.json) if isinstance(asked.json, str) else None
    return json_rule(schema) if isinstance(schema, Mapping) else None
