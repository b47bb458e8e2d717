"""DeepSeek R1 and its distilled models: reasoning between `<think>` tags, which most templates open in the prompt, and
calls in a section of their own.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

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
from dovetail.plugins.dialects.shapes import SPACE, Shape, group, lit, seq
from dovetail.plugins.dialects.signs import reasons_without

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
THINK = ("<think>\n", "\n</think>\n\n")
_HEAD, _FENCE = f"{CALL_BEGIN}function{SEPARATOR}", "\n```json\n"
_TAIL = f"\n```{CALL_END}"

_CALL = seq(lit(_HEAD), group("name", r"[^\n<]"), lit(_FENCE), SPACE, lit("{"))
SYNTAX = CallSyntax(
    start=Shape(seq(lit(CALLS_BEGIN), SPACE, _CALL)),
    next=Shape(seq(SPACE, lit("```"), lit(CALL_END), SPACE, _CALL)),
    end=Shape(seq(SPACE, lit("```"), lit(CALL_END), SPACE, lit(CALLS_END))),
)


class DeepSeekGrammar(CallGrammar):
    """Calls in one section."""

    marker = CALLS_BEGIN

    def calls(self, writer: Writer, tools: Sequence[Tool], many: bool) -> str:
        """See `CallGrammar.calls`."""
        names = [writer.rule(f"call_{index}", self._call(writer, tool)) for index, tool in enumerate(tools)]
        one = f"({' | '.join(names)})"
        rest = f'("\\n" {one})* ' if many else ""
        return f"{one} {rest}{writer.literal(CALLS_END)}"

    def _call(self, writer: Writer, tool: Tool) -> str:
        head = f"{_HEAD}{tool.name}{_FENCE}"
        return f"{writer.literal(head)} {json_rule(schema_of(tool))} {writer.literal(_TAIL)}"


class DeepSeekR1Dialect(Dialect):
    """Reasoning between `<think>` tags, calls as fenced JSON."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = DialectCapabilities(
        tools=True, parallel_calls=True, reasoning=True, grammars=True, markers_in_arguments=True
    )
    preference = 3
    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR, "<think>", "</think>")
    reasoning_markers = THINK

    @classmethod
    def check(cls, need: DialectNeed, options: PluginOptions, environment: Environment) -> list[str]:
        """Under `auto`: the model's template must write the section, with fences."""
        against = reasons_without(cls, need, CALLS_BEGIN)
        is_fenced = need.is_named or need.chat_template is None or "```json" in need.chat_template
        return against or ([] if is_fenced else [f"{cls.__name__} needs calls in fences of ```json."])

    def parser(self, request: DialectRequest) -> DialectParser:
        """See `Dialect.parser`."""
        return TextParser(request, THINK, SYNTAX)

    def grammar(self, request: DialectRequest) -> str | None:
        """See `Dialect.grammar`."""
        return write_grammar(request, self.setup, THINK, DeepSeekGrammar())

    def render_message(self, message: AssistantMessage) -> str:
        """See `Dialect.render_message`."""
        calls = "\n".join(f"{_HEAD}{call.name}{_FENCE}{call.arguments}{_TAIL}" for call in message.calls)
        thought = f"{THINK[0]}{message.reasoning}{THINK[1]}" if message.reasoning else ""
        return thought + message.content + (f"{CALLS_BEGIN}{calls}{CALLS_END}" if calls else "")
