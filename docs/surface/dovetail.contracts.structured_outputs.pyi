from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dovetail.contracts.grammar_spec import GrammarSpec
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    max_whitespace: int | None = None
    starts_after: str | Sequence[int] = ()
    spec: GrammarSpec = field(init=False, repr=False, compare=False)
