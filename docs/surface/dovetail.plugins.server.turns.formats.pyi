import json
from collections.abc import Sequence
from dovetail.contracts.structured_outputs import StructuredOutputs
from typing import Any

ANY_OBJECT = _JSON + json.dumps({'type': 'object'})
def format_expression(
    asked: Any,
    param: str = 'response_format',
    *,
    has_schema_inside: bool = False,
) -> str | None: ...
def choice_expression(choices: Sequence[str]) -> str: ...
def form_of(expression: str) -> StructuredOutputs | None: ...
def expression_of(asked: StructuredOutputs) -> str | None: ...
