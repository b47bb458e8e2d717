from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.plugins.server.bodies import Body, Ignored
from typing import Any


class StructuredFields(Body, kw_only=True):
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


class FormFields(Body, kw_only=True):
    structured_outputs: StructuredFields | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None

def form_field(fields: FormFields) -> str | None: ...
def structured_outputs(fields: FormFields) -> StructuredOutputs | None: ...
def response_form(
    asked: Any,
    param: str = 'response_format',
    *,
    has_schema_inside: bool = False,
) -> StructuredOutputs | None: ...
