"""Mistral's models, which write calls behind `[TOOL_CALLS]`: as a list of JSON objects, or, in those with the token
`[ARGS]`, as name and arguments; reasoning between `[THINK]` and `[/THINK]`.

    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 2}}]
    [TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import ClassVar, Literal

from dovetail.contracts.dialect import (
    AssistantMessage,
    Dialect,
    DialectCapabilities,
    DialectNeed,
    DialectParser,
    DialectRequest,
    DialectSetup,
    Tool,
    ToolCall,
)
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.plugins.dialects.grammars import CallGrammar, write_grammar
from dovetail.plugins.dialects.lark import Writer, json_rule, schema_of
from dovetail.plugins.dialects.parsing import CallSyntax, TextParser
from dovetail.plugins.dialects.shapes import SPACE, Shape, alt, group, json_string, lit, opt, seq
from dovetail.plugins.dialects.signs import reasons_without

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
THINK = ("[THINK]", "[/THINK]")

_LISTED = seq(
    *(lit("{"), SPACE, lit('"name"'), SPACE, lit(":"), SPACE, json_string("json_name"), SPACE),
    alt(seq(lit(","), SPACE, lit('"arguments"'), SPACE, lit(":"), SPACE, lit("{")), lit("}")),
)
_NAMED = seq(
    group("name", r'[^\[\]{}"\s]'),
    opt(seq(lit(CALL_ID), group("call_id", r"[^\[\]{}\s]"))),
    opt(lit(ARGS)),
    SPACE,
    lit("{"),
)
_ID = opt(seq(SPACE, lit(","), SPACE, lit('"id"'), SPACE, lit(":"), SPACE, json_string("own_id")))
_ITEM_END = seq(_ID, SPACE, opt(seq(lit("}"), SPACE)))
SYNTAX = CallSyntax(
    start=Shape(seq(lit(CALLS), SPACE, alt(seq(lit("["), SPACE, _LISTED), _NAMED))),
    next=Shape(seq(_ITEM_END, lit(","), SPACE, _LISTED)),
    end=Shape(seq(_ITEM_END, lit("]"))),
)


class MistralOptions(PluginOptions):
    """How calls are written; both forms are read."""

    form: Literal["auto", "list", "name"] = "auto"
    """List: a JSON list. Name: name and arguments. Auto: name where the tokenizer has `[ARGS]`."""


class ListGrammar(CallGrammar):
    """One JSON list of calls."""

    marker = CALLS

    def calls(self, writer: Writer, tools: Sequence[Tool], many: bool) -> str:
        """See `CallGrammar.calls`."""
        names = [writer.rule(f"call_{index}", self._call(writer, tool)) for index, tool in enumerate(tools)]
        one = f"({' | '.join(names)})"
        rest = f'(", " {one})* ' if many else ""
        return f'"[" {one} {rest}"]"'

    def _call(self, writer: Writer, tool: Tool) -> str:
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
        return f'{writer.literal(head)} {json_rule(schema_of(tool))} "}}"'


class NameGrammar(CallGrammar):
    """Name and arguments, each call behind a marker of its own."""

    marker = CALLS

    def calls(self, writer: Writer, tools: Sequence[Tool], many: bool) -> str:
        """See `CallGrammar.calls`."""
        names = [
            writer.rule(f"call_{index}", f"{writer.literal(tool.name + ARGS)} {json_rule(schema_of(tool))}")
            for index, tool in enumerate(tools)
        ]
        one = f"({' | '.join(names)})"
        return f"{one} ({writer.literal(CALLS)} {one})*" if many else one


class MistralDialect(Dialect):
    """Calls behind `[TOOL_CALLS]`, reasoning between `[THINK]` and `[/THINK]`. An id behind the arguments of a list's
    item is not reported: it comes too late."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options = MistralOptions
    options: MistralOptions
    capabilities = DialectCapabilities(
        tools=True, parallel_calls=True, reasoning=True, grammars=True, markers_in_arguments=True
    )
    preference = 1
    markers = (CALLS, ARGS, CALL_ID, *THINK)
    reasoning_markers = THINK

    def __init__(self, options: MistralOptions, setup: DialectSetup):
        super().__init__(options, setup)
        self._has_names = options.form == "name" or (options.form == "auto" and ARGS in setup.special_tokens)

    @classmethod
    def check(cls, need: DialectNeed, options: PluginOptions, environment: Environment) -> list[str]:
        """Under `auto`: the model's template must write the marker, or, without one, its tokenizer have it."""
        return reasons_without(cls, need, CALLS)

    def parser(self, request: DialectRequest) -> DialectParser:
        """See `Dialect.parser`."""
        return TextParser(request, THINK, SYNTAX)

    def grammar(self, request: DialectRequest) -> str | None:
        """See `Dialect.grammar`."""
        return write_grammar(request, self.setup, THINK, NameGrammar() if self._has_names else ListGrammar())

    def render_message(self, message: AssistantMessage) -> str:
        """See `Dialect.render_message`. Ids are written by models that have a token for them."""
        thought = f"{THINK[0]}{message.reasoning}{THINK[1]}" if message.reasoning else ""
        if self._has_names:
            return thought + message.content + "".join(map(self._named, message.calls))
        calls = ", ".join(f'{{"name": {_json(call.name)}, "arguments": {call.arguments}}}' for call in message.calls)
        return thought + message.content + (f"{CALLS}[{calls}]" if calls else "")

    def _named(self, call: ToolCall) -> str:
        has_id = call.call_id and CALL_ID in self.setup.special_tokens
        return f"{CALLS}{call.name}{CALL_ID + call.call_id if has_id else ''}{ARGS}{call.arguments}"


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
