"""ChatML models that write calls as JSON between `<tool_call>` tags: Hermes, Qwen 2.5 and 3, and many others; reasoning
between `<think>` tags, as Qwen 3 has it.

    <think>
    They want the weather.
    </think>

    Let me see.
    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import ClassVar

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
from dovetail.plugins.dialects.lark import Writer, json_rule, schema_of
from dovetail.plugins.dialects.parsing import CallSyntax, TextParser
from dovetail.plugins.dialects.shapes import LINE_BREAK, SPACE, Shape, alt, json_string, lit, opt, seq
from dovetail.plugins.dialects.signs import reasons_without

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK = ("<think>\n", "\n</think>\n\n")

_ARGUMENTS = seq(lit(","), SPACE, alt(lit('"arguments"'), lit('"parameters"')), SPACE, lit(":"), SPACE, lit("{"))
_NAME = seq(lit("{"), SPACE, lit('"name"'), SPACE, lit(":"), SPACE, json_string("json_name"), SPACE)
SYNTAX = CallSyntax(
    start=Shape(seq(LINE_BREAK, lit(OPEN), SPACE, _NAME, alt(_ARGUMENTS, lit("}")))),
    end=Shape(seq(SPACE, opt(seq(lit("}"), SPACE)), lit(CLOSE))),
)


class HermesGrammar(CallGrammar):
    """Calls in the tags, one in each."""

    marker = OPEN

    def calls(self, writer: Writer, tools: Sequence[Tool], many: bool) -> str:
        """See `CallGrammar.calls`."""
        names = [writer.rule(f"call_{index}", self._call(writer, tool)) for index, tool in enumerate(tools)]
        one = f"({' | '.join(names)})"
        return f"{one} ({writer.literal(chr(10) + OPEN)} {one})*" if many else one

    def _call(self, writer: Writer, tool: Tool) -> str:
        head = f'\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
        return f"{writer.literal(head)} {json_rule(schema_of(tool))} {writer.literal('}' + chr(10) + CLOSE)}"


class HermesDialect(Dialect):
    """JSON between `<tool_call>` tags, reasoning between `<think>` tags."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = DialectCapabilities(
        tools=True, parallel_calls=True, reasoning=True, grammars=True, markers_in_arguments=True
    )
    preference = 2
    markers = (OPEN, CLOSE, "<think>", "</think>")
    reasoning_markers = THINK

    @classmethod
    def check(cls, need: DialectNeed, options: PluginOptions, environment: Environment) -> list[str]:
        """Under `auto`: the model's template must write the tags."""
        return reasons_without(cls, need, OPEN, but=("<function=",))

    def parser(self, request: DialectRequest) -> DialectParser:
        """See `Dialect.parser`."""
        return TextParser(request, THINK, SYNTAX)

    def grammar(self, request: DialectRequest) -> str | None:
        """See `Dialect.grammar`."""
        return write_grammar(request, self.setup, THINK, HermesGrammar())

    def render_message(self, message: AssistantMessage) -> str:
        """See `Dialect.render_message`."""
        calls = [
            f'{OPEN}\n{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}}}\n{CLOSE}'
            for call in message.calls
        ]
        thought = f"{THINK[0]}{message.reasoning}{THINK[1]}" if message.reasoning else ""
        return thought + "\n".join([*([message.content] if message.content else []), *calls])
