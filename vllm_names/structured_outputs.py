"""`StructuredOutputsParams` and `GuidedDecodingParams` as vLLM's programs use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.vllm.missing import refuse


class StructuredOutputsParams(StructuredOutputs):
    """Dovetail's `StructuredOutputs` with vLLM's arguments; `disable_any_whitespace` is `max_whitespace=0`."""

    def __init__(
        self,
        json: str | dict[str, Any] | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        disable_fallback: bool = False,
        disable_any_whitespace: bool = False,
        disable_additional_properties: bool = False,
        whitespace_pattern: str | None = None,
        structural_tag: str | None = None,
    ):
        """Raises `RequestError` for what cannot be served. `disable_fallback` says what happens anyway: there is one
        grammar plugin, and it never falls back."""
        if disable_additional_properties:
            refuse(
                f"{type(self).__name__}(disable_additional_properties=True)",
                'write "additionalProperties": false into the schema',
            )
        if whitespace_pattern is not None:
            refuse(
                f"{type(self).__name__}(whitespace_pattern=...)",
                "dovetail.StructuredOutputs has max_whitespace, a number of characters",
            )
        super().__init__(
            json=json,
            regex=regex,
            choice=choice,
            grammar=grammar,
            json_object=json_object,
            structural_tag=structural_tag,
            max_whitespace=0 if disable_any_whitespace and (json is not None or json_object) else None,
        )


class GuidedDecodingParams(StructuredOutputsParams):
    """vLLM's older name."""

    def __init__(
        self,
        json: str | dict[str, Any] | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        backend: str | None = None,
        **given: Any,
    ):
        """Raises `RequestError` for what cannot be served, TypeError for a name that does not exist."""
        if backend is not None and backend != "auto":
            refuse(f"GuidedDecodingParams(backend={backend!r})", "grammar.name is for all requests")
        super().__init__(json, regex, choice, grammar, json_object, **given)
