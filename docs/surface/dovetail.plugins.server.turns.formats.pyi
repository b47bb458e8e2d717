from collections.abc import Sequence
from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.plugins.dialects.lark import json_rule
from typing import Any

ANY_OBJECT = json_rule({'type': 'object'})
def format_expression(
    asked: Any,
    param: str = 'response_format',
    *,
    has_schema_inside: bool = False,
) -> str | None: ...
def choice_expression(choices: Sequence[str]) -> str: ...
def form_of(expression: str) -> StructuredOutputs | None: ...
def expression_of(asked: StructuredOutputs) -> str | None: ...
