"""Response formats as expressions of a dialect's grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.plugins.server.structured import response_form

_JSON = "%json "
"""Before a schema, in the grammars of dialects. The folder of dialects, which may be gone, is not asked."""
ANY_OBJECT = _JSON + json.dumps({"type": "object"})


def format_expression(asked: Any, param: str = "response_format", *, has_schema_inside: bool = False) -> str | None:
    """Of a response format, as `response_form` reads it; None for text. Raises `APIError` 400."""
    form = response_form(asked, param, has_schema_inside=has_schema_inside)
    return None if form is None else expression_of(form)


def choice_expression(choices: Sequence[str]) -> str:
    """One of some texts."""
    return f"({' | '.join(json.dumps(choice, ensure_ascii=False) for choice in choices)})"


def form_of(expression: str) -> StructuredOutputs | None:
    """The form that an expression of a schema says; None for others."""
    return StructuredOutputs(json=expression.removeprefix(_JSON)) if expression.startswith(_JSON) else None


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
    return _JSON + json.dumps(schema) if isinstance(schema, Mapping) else None
