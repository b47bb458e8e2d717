"""Llama 3.1 to 3.3, which write a call as a JSON object in the text, with `<|python_tag|>` before it or without.

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}

An object is a call where its first keys are a name and parameters (or arguments) that are an object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dovetail.contracts.dialect import (
    AssistantMessage,
    Dialect,
    DialectCapabilities,
    DialectNeed,
    DialectParser,
    DialectRequest,
    Tool,
)
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.plugins.dialects.grammars import CallGrammar, write_grammar
from dovetail.plugins.dialects.lark import Writer, json_rule, schema_of, text_without
from dovetail.plugins.dialects.parsing import CallSyntax, TextParser
from dovetail.plugins.dialects.schema_types import with_definitions
from dovetail.plugins.dialects.shapes import LINE_BREAK, SPACE, Shape, alt, json_string, lit, opt, seq
from dovetail.plugins.dialects.signs import reasons_without

PYTHON_TAG = "<|python_tag|>"
BEGIN = '{"name": "'

_TYPE = opt(seq(lit('"type"'), SPACE, lit(":"), SPACE, lit('"function"'), SPACE, lit(","), SPACE))
_CALL = seq(
    *(opt(seq(lit(PYTHON_TAG), SPACE)), lit("{"), SPACE, _TYPE, lit('"name"'), SPACE, lit(":"), SPACE),
    *(json_string("json_name"), SPACE, lit(","), SPACE, alt(lit('"parameters"'), lit('"arguments"')), SPACE),
    *(lit(":"), SPACE, lit("{")),
)
SYNTAX = CallSyntax(
    start=Shape(seq(LINE_BREAK, _CALL)),
    next=Shape(seq(SPACE, lit("}"), SPACE, opt(seq(alt(lit(";"), lit(",")), SPACE)), _CALL)),
    end=Shape(seq(SPACE, lit("}"))),
)


class LlamaGrammar(CallGrammar):
    """JSON objects, with semicolons between them."""

    marker = BEGIN

    def free_text(self, others: Sequence[str]) -> str:
        """See `CallGrammar.free_text`. The parser takes objects with white space in them and a type before the name."""
        return text_without(['{"name"', '{"type"'], spaced=True)

    def calls_alone(self, writer: Writer, tools: Sequence[Tool], many: bool) -> str:
        """See `CallGrammar.calls_alone`. JSON as a whole: a response format may be JSON as well, and begin alike."""
        one = f"({' | '.join(json_rule(_object(tool)) for tool in tools)})"
        return f'{one} ("; " {one})*' if many else one

    def calls(self, writer: Writer, tools: Sequence[Tool], many: bool) -> str:
        """See `CallGrammar.calls`."""
        names = [writer.rule(f"call_{index}", self._call(writer, tool)) for index, tool in enumerate(tools)]
        one = f"({' | '.join(names)})"
        return f"{one} ({writer.literal('; ' + BEGIN)} {one})*" if many else one

    def _call(self, writer: Writer, tool: Tool) -> str:
        rest = json.dumps(tool.name, ensure_ascii=False)[1:] + ', "parameters": '
        return f'{writer.literal(rest)} {json_rule(schema_of(tool))} "}}"'


def _object(tool: Tool) -> Mapping[str, Any]:
    schema = schema_of(tool)
    properties = {"name": {"const": tool.name}, "parameters": schema}
    return with_definitions(
        {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False},
        schema,
    )


class Llama3Dialect(Dialect):
    """Calls as JSON objects in the text; no reasoning."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = DialectCapabilities(tools=True, parallel_calls=True, grammars=True, markers_in_arguments=True)
    markers = (PYTHON_TAG, '{"name"')
    stop_tokens = ("<|eom_id|>", "<|eot_id|>")

    @classmethod
    def check(cls, need: DialectNeed, options: PluginOptions, environment: Environment) -> list[str]:
        """Under `auto`: the model's template must ask for JSON objects with parameters between Llama 3's headers."""
        against = reasons_without(cls, need, "<|start_header_id|>")
        asks = need.is_named or (need.chat_template is not None and '"parameters"' in need.chat_template)
        return against or ([] if asks else [f"{cls.__name__} needs a chat template that asks for calls as JSON."])

    def parser(self, request: DialectRequest) -> DialectParser:
        """See `Dialect.parser`."""
        return TextParser(request, None, SYNTAX)

    def grammar(self, request: DialectRequest) -> str | None:
        """See `Dialect.grammar`."""
        return write_grammar(request, self.setup, None, LlamaGrammar())

    def render_message(self, message: AssistantMessage) -> str:
        """See `Dialect.render_message`."""
        calls = "; ".join(
            f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "parameters": {call.arguments}}}'
            for call in message.calls
        )
        return message.content + ("\n" if message.content and calls else "") + calls
