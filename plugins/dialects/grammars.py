"""The grammar that the bundled dialects share: reasoning, then content with calls in it, calls alone, or a response in
a format, as the request has it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dovetail.contracts.dialect import DialectRequest, DialectSetup, Tool
from dovetail.plugins.dialects.lark import Writer, called_tools, has_many, is_free, text_without
from dovetail.plugins.dialects.parsing import think_syntax


class CallGrammar(ABC):
    """How a dialect writes calls, for a grammar."""

    marker: str
    """What calls begin with."""

    @abstractmethod
    def calls(self, writer: Writer, tools: Sequence[Tool], many: bool) -> str:
        """An expression of one call, or several, behind the first marker."""

    def calls_alone(self, writer: Writer, tools: Sequence[Tool], many: bool) -> str:
        """The same with the first marker, where there is no content before."""
        return f"{writer.literal(self.marker)} {self.calls(writer, tools, many)}"

    def free_text(self, others: Sequence[str]) -> str:
        """A regular expression of content in which no call begins, and none of the other markers is."""
        return text_without([self.marker, *others])


def write_grammar(
    request: DialectRequest, setup: DialectSetup, think: tuple[str, str] | None, syntax: CallGrammar
) -> str | None:
    """The grammar of a request; see `Dialect.grammar`. `think`: as `Dialect.reasoning_markers`."""
    if is_free(request):
        return None
    writer, many = Writer(setup.special_tokens), has_many(request)
    tools, may_answer = called_tools(request), request.choice.mode in ("auto", "none")
    if tools and may_answer and request.response_format is None:
        text = syntax.free_text([] if think is None else [marker.strip() for marker in think])
        calls = writer.rule("calls", syntax.calls(writer, tools, many))
        body = f"({writer.text_to('to_call', syntax.marker, text)} {calls}){'*' if many else '?'}"
        return writer.done(f"{_reasoning(writer, request, think, '')}{body} {writer.rule('TEXT', f'/{text}/')}")
    choices = [syntax.calls_alone(writer, tools, many)] if tools else []
    if may_answer and request.response_format is not None:
        choices.append(request.response_format)
    behind = "" if think is None else think[1].partition(think[1].strip())[2]
    return writer.done(f"{_reasoning(writer, request, think, behind)}({' | '.join(choices)})")


def _reasoning(writer: Writer, request: DialectRequest, think: tuple[str, str] | None, behind: str) -> str:
    """Reasoning, if there may be some; `behind`: line breaks that follow it."""
    if think is None:
        return ""
    open_marker, close_marker = think[0].strip(), think[1].strip()
    end = f"{writer.literal(behind)} " if behind else ""
    if think_syntax(*think).is_open(request.prompt_tail):
        text = writer.text_to("reasoning", close_marker) if request.reasoning else writer.literal(close_marker)
        return f"{text} {end}"
    if not request.reasoning:
        return ""
    return f"({writer.text_to('reasoning', close_marker, before=open_marker)} {end})? "
