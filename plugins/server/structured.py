"""vLLM's fields for the form of an output."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from dovetail.contracts.errors import RequestError
from dovetail.contracts.route import APIError
from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.plugins.server.bodies import Body, Ignored

_SCHEMA_KEYS = frozenset({"name", "description", "schema", "strict"})
"""Of OpenAI's `json_schema`. Only the schema changes an answer."""


class StructuredFields(Body, kw_only=True):
    """vLLM's `structured_outputs`."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    max_whitespace: int | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: Ignored = None
    """There is one grammar plugin, and none to fall back to."""


class FormFields(Body, kw_only=True):
    """`structured_outputs`, and the names that it had before."""

    structured_outputs: StructuredFields | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None


def form_field(fields: FormFields) -> str | None:
    """The one of these fields that gives the form of an output; None: none does."""
    if fields.structured_outputs is not None:
        return "structured_outputs"
    return next((f"guided_{form}" for form in _guided(fields)), None)


def _guided(fields: FormFields) -> dict[str, Any]:
    """The forms that vLLM's older fields give."""
    forms = {
        "json": fields.guided_json,
        "regex": fields.guided_regex,
        "choice": fields.guided_choice,
        "grammar": fields.guided_grammar,
    }
    return {form: value for form, value in forms.items() if value is not None}


def structured_outputs(fields: FormFields) -> StructuredOutputs | None:
    """What the fields ask for, None for nothing. Raises `APIError` 400 that names the field."""
    _refuse("guided_decoding_backend", fields.guided_decoding_backend, "set the config's grammar.name")
    _refuse("guided_whitespace_pattern", fields.guided_whitespace_pattern, "give structured_outputs.max_whitespace")
    older = _guided(fields)
    asked = fields.structured_outputs
    if asked is None:
        return _made(older, f"guided_{min(older)}") if older else None
    if older:
        name = f"guided_{min(older)}"
        raise APIError(400, f"{name} and structured_outputs exclude each other: give one of them", param=name)
    where = "structured_outputs"
    _refuse(f"{where}.whitespace_pattern", asked.whitespace_pattern, "give max_whitespace")
    _refuse(
        f"{where}.disable_additional_properties",
        asked.disable_additional_properties,
        "say additionalProperties: false in the schema",
    )
    values = msgspec.structs.asdict(asked)
    given: dict[str, Any] = {
        name: values[name]
        for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "max_whitespace")
        if values[name] is not None
    }
    if asked.disable_any_whitespace:
        given["max_whitespace"] = 0
    return _made(given, where)


def response_form(
    asked: Any, param: str = "response_format", *, has_schema_inside: bool = False
) -> StructuredOutputs | None:
    """The form of a response format, which the field `param` gave; None for text. `has_schema_inside`: a format has
    `schema` itself, as responses and Anthropic's have, and not under `json_schema`. Raises `APIError` 400 that names
    the field."""
    if asked is None:
        return None
    asked = _object(asked, param, {"type", *(_SCHEMA_KEYS if has_schema_inside else ("json_schema",))})
    kind = asked.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        message = f"{param}.type must be text, json_object or json_schema, got {kind!r}"
        raise APIError(400, message, param=f"{param}.type")
    if not has_schema_inside:
        param = f"{param}.json_schema"
        asked = _object(asked.get("json_schema"), param, _SCHEMA_KEYS)
    schema = asked.get("schema")
    if not isinstance(schema, Mapping):
        raise APIError(400, f"{param}.schema must be a JSON schema, which is an object", param=f"{param}.schema")
    return _made({"json": schema}, f"{param}.schema")


def _object(value: Any, param: str, known: Collection[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise APIError(400, f"{param} must be an object", param=param)
    unknown = sorted(value.keys() - known)
    if unknown:
        raise APIError(400, f"{param} has the unknown key {unknown[0]!r}", param=f"{param}.{unknown[0]}")
    return value


def _made(given: dict[str, Any], param: str) -> StructuredOutputs:
    try:
        return StructuredOutputs(**given)
    except RequestError as error:
        raise APIError(400, str(error), param=param) from None


def _refuse(name: str, value: object, instead: str) -> None:
    if value:
        raise APIError(400, f"{name} is not served: {instead}", param=name)
