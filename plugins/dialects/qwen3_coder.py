"""Qwen 3 Coder and Qwen 3.5, which write arguments as tagged text without types.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    <parameter=days>
    3
    </parameter>
    </function>
    </tool_call>

The JSON that is reported has the types of the tool's schema (xml_arguments.py).
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
    ToolCall,
)
from dovetail.contracts.errors import RequestError
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.plugins.dialects.grammars import CallGrammar, write_grammar
from dovetail.plugins.dialects.json_text import raw_items
from dovetail.plugins.dialects.lark import Writer, json_rule, text_without
from dovetail.plugins.dialects.parsing import CallSyntax, TextParser
from dovetail.plugins.dialects.schema_types import types_of, with_definitions
from dovetail.plugins.dialects.shapes import LINE_BREAK, SPACE, Shape, group, lit, opt, seq
from dovetail.plugins.dialects.signs import reasons_without
from dovetail.plugins.dialects.xml_arguments import CLOSE_PARAMETER, XMLArguments

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, CLOSE_FUNCTION, PARAMETER = "<function=", "</function>", "<parameter="
THINK = ("<think>\n", "\n</think>\n\n")
_UNKEPT = ("pattern", "format", "minLength", "maxLength")

SYNTAX = CallSyntax(
    start=Shape(
        seq(LINE_BREAK, opt(seq(lit(OPEN), SPACE)), lit(FUNCTION), group("name", r"[^>\n]"), lit(">")),
    ),
    end=Shape(seq(SPACE, lit(CLOSE))),
    arguments=XMLArguments,
    is_argument="",
)


class QwenGrammar(CallGrammar):
    """Calls in the tags, one in each; of strict tools the parameters of the schema in its order."""

    marker = OPEN

    def free_text(self, others: Sequence[str]) -> str:
        """See `CallGrammar.free_text`. The parser takes functions without the tag around them, too."""
        return text_without([OPEN, FUNCTION, *others])

    def calls(self, writer: Writer, tools: Sequence[Tool], many: bool) -> str:
        """See `CallGrammar.calls`."""
        text = writer.text_to("text_value", CLOSE_PARAMETER)
        names = [writer.rule(f"call_{i}", self._call(writer, i, tool, text)) for i, tool in enumerate(tools)]
        one = f"({' | '.join(names)})"
        return f"{one} ({writer.literal(chr(10) + OPEN)} {one})*" if many else one

    def _call(self, writer: Writer, index: int, tool: Tool, text: str) -> str:
        schema = tool.parameters if tool.strict and tool.parameters is not None else None
        parameters = f'({writer.literal(PARAMETER)} /[^>\\n]+/ ">\\n" {text} "\\n")*'
        if schema is not None:
            rules = [
                self._parameter(writer, f"value_{index}_{number}", tool, name, text)
                for number, name in enumerate(schema.get("properties", {}))
            ]
            parameters = " ".join(rules)
        head, tail = f"\n{FUNCTION}{tool.name}>\n", f"{CLOSE_FUNCTION}\n{CLOSE}"
        return f"{writer.literal(head)} {parameters} {writer.literal(tail)}"

    def _parameter(self, writer: Writer, rule: str, tool: Tool, name: str, text: str) -> str:
        root = tool.parameters or {}
        value = root["properties"][name]
        types = types_of(value, root)
        if "string" in types:
            body = _text_rule(writer, tool, name, value, text)
        else:
            body = f"{json_rule(with_definitions(value, root))} {writer.literal(chr(10) + CLOSE_PARAMETER)}"
        one = writer.rule(rule, f'{writer.literal(f"{PARAMETER}{name}>" + chr(10))} {body} "\\n"')
        return one if name in root.get("required", ()) else f"{one}?"


def _text_rule(writer: Writer, tool: Tool, name: str, value: Any, text: str) -> str:
    """A parameter that may be a string, up to the end of its tag."""
    schema: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    unkept = [keyword for keyword in _UNKEPT if keyword in schema]
    if unkept:
        raise RequestError(
            f"tool {tool.name!r}: arguments must fit its schema (it is strict, or a call is required), and parameter "
            f"{name!r} has the keyword {unkept[0]}, which dialect qwen3_coder cannot keep to, since it writes strings "
            "as they are: leave the keyword out, or ask neither for strict nor for a call"
        )
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not choices:
        return text
    texts = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
    return f"({' | '.join(map(writer.literal, texts))}) {writer.literal(chr(10) + CLOSE_PARAMETER)}"


class Qwen3CoderDialect(Dialect):
    """Arguments as tagged text between `<tool_call>` tags, reasoning between `<think>` tags."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = DialectCapabilities(tools=True, parallel_calls=True, reasoning=True, grammars=True)
    preference = 2
    markers = (OPEN, CLOSE, FUNCTION, CLOSE_FUNCTION, PARAMETER, CLOSE_PARAMETER, "<think>", "</think>")
    reasoning_markers = THINK

    @classmethod
    def check(cls, need: DialectNeed, options: PluginOptions, environment: Environment) -> list[str]:
        """Under `auto`: the model's template must write the tag of functions."""
        return reasons_without(cls, need, FUNCTION)

    def parser(self, request: DialectRequest) -> DialectParser:
        """See `Dialect.parser`."""
        return TextParser(request, THINK, SYNTAX)

    def grammar(self, request: DialectRequest) -> str | None:
        """See `Dialect.grammar`."""
        return write_grammar(request, self.setup, THINK, QwenGrammar())

    def render_message(self, message: AssistantMessage) -> str:
        """See `Dialect.render_message`. Raises `ValueError` for arguments that are no JSON object."""
        thought = f"{THINK[0]}{message.reasoning}{THINK[1]}" if message.reasoning else ""
        return thought + "\n".join([*([message.content] if message.content else []), *map(_call, message.calls)])


def _call(call: ToolCall) -> str:
    parameters = "".join(
        f"{PARAMETER}{key}>\n{json.loads(raw, strict=False) if raw[0] == chr(34) else raw}\n{CLOSE_PARAMETER}\n"
        for key, raw in raw_items(call.arguments)
    )
    return f"{OPEN}\n{FUNCTION}{call.name}>\n{parameters}{CLOSE_FUNCTION}\n{CLOSE}"
