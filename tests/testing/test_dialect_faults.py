"""What the suite of dialects finds: each a change in a dialect that passes."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from dovetail.contracts.dialect import (
    ArgumentsDelta,
    AssistantMessage,
    CallBegin,
    CallEnd,
    DialectParser,
    DialectRequest,
    DialectSetup,
    Event,
    TextDelta,
    Tool,
    ToolCall,
    message_of,
)
from dovetail.plugins.dialects import hermes
from dovetail.plugins.dialects.hermes import HermesDialect
from dovetail.plugins.dialects.parsing import TextParser
from dovetail.plugins.dialects.shapes import LINE_BREAK, SPACE, Shape, alt, json_string, lit, seq
from dovetail.testing.dialect_suite import DialectSuite
from dovetail.testing.faults import Fault, check_fault


class Changed(DialectParser):
    """Hermes' parser, with something done to its events."""

    def __init__(self, request: DialectRequest):
        self.request = request
        self.parser = TextParser(request, hermes.THINK, hermes.SYNTAX)

    def push(self, text: str) -> list[Event]:
        return self.changed(self.parser.push(text))

    def finish(self) -> list[Event]:
        return self.changed(self.parser.finish())

    def changed(self, events: list[Event]) -> list[Event]:
        return events


class ForgetsPieces(Changed):
    """Each piece is parsed by itself: a marker that two share is not found."""

    def push(self, text: str) -> list[Event]:
        parser = TextParser(self.request, hermes.THINK, hermes.SYNTAX)
        return parser.push(text) + parser.finish()

    def finish(self) -> list[Event]:
        return []


class WaitsForTheEnd(Changed):
    def __init__(self, request: DialectRequest):
        super().__init__(request)
        self.text = ""

    def push(self, text: str) -> list[Event]:
        self.text += text
        return []

    def finish(self) -> list[Event]:
        return self.parser.push(self.text) + self.parser.finish()


class KeepsArguments(Changed):
    """Until the call ends, as a parser does that reads them with `json.loads`."""

    def __init__(self, request: DialectRequest):
        super().__init__(request)
        self.arguments = ""

    def changed(self, events: list[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            if isinstance(event, ArgumentsDelta):
                self.arguments += event.text
                continue
            if isinstance(event, CallEnd):
                kept += [ArgumentsDelta(event.index, self.written(event))] if self.arguments else []
                self.arguments = ""
            kept.append(event)
        return kept

    def written(self, end: CallEnd) -> str:
        return self.arguments


class RoundsNumbers(KeepsArguments):
    def written(self, end: CallEnd) -> str:
        return json.dumps(json.loads(self.arguments)) if end.ending == "complete" else self.arguments


class PassesHalvesOn(Changed):
    """Hands out the escapes that a model wrote."""

    def changed(self, events: list[Event]) -> list[Event]:
        return [
            replace(event, text=event.text.replace("\\ufffd", "\\ud83e"))
            if isinstance(event, ArgumentsDelta)
            else event
            for event in events
        ]


class TextOnly(Changed):
    """Of each text alone."""

    def changed(self, events: list[Event]) -> list[Event]:
        return [self.text(event) if isinstance(event, TextDelta) else event for event in events]

    def text(self, event: TextDelta) -> Event:
        return event


class StripsContent(TextOnly):
    def text(self, event: TextDelta) -> Event:
        return TextDelta(event.text.replace("\n", " "))


class LosesDigits(TextOnly):
    def text(self, event: TextDelta) -> Event:
        return TextDelta(re.sub(r"\d", "_", event.text))


class DropsWhatFollowsABrokenCall(Changed):
    def __init__(self, request: DialectRequest):
        super().__init__(request)
        self.is_broken = False

    def changed(self, events: list[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            self.is_broken = self.is_broken or (isinstance(event, CallEnd) and event.ending == "malformed")
            kept += [event] if not (self.is_broken and isinstance(event, TextDelta)) else []
        return kept


class ShowsBrokenCallsTwice(Changed):
    """What was streamed as arguments comes once more as content."""

    def __init__(self, request: DialectRequest):
        super().__init__(request)
        self.arguments = ""

    def changed(self, events: list[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            kept.append(event)
            if isinstance(event, ArgumentsDelta):
                self.arguments += event.text
            elif isinstance(event, CallEnd):
                kept += [TextDelta(self.arguments)] if event.ending == "malformed" and self.arguments else []
                self.arguments = ""
        return kept


class CallsAllComplete(Changed):
    def changed(self, events: list[Event]) -> list[Event]:
        return [CallEnd(event.index) if isinstance(event, CallEnd) else event for event in events]


class NeverEndsCutCalls(Changed):
    def finish(self) -> list[Event]:
        return [event for event in super().finish() if not isinstance(event, CallEnd)]


class KnowsItsToolsOnly(Changed):
    def changed(self, events: list[Event]) -> list[Event]:
        known = {tool.name for tool in self.request.tools}
        return [event for event in events if not isinstance(event, CallBegin) or event.name in known]


class SaysNothingAtLength(Changed):
    def push(self, text: str) -> list[Event]:
        return super().push(text) or [TextDelta("")]


class CountsFromOne(Changed):
    def changed(self, events: list[Event]) -> list[Event]:
        return [
            replace(event, index=event.index + 1) if isinstance(event, CallBegin | ArgumentsDelta | CallEnd) else event
            for event in events
        ]


class Faulty(HermesDialect):
    """Hermes with another parser."""

    parser_class: type[Changed] = Changed

    def parser(self, request: DialectRequest) -> DialectParser:
        return self.parser_class(request)


def parses_by(parser: type[Changed]) -> type[Faulty]:
    return type(f"Hermes{parser.__name__}", (Faulty,), {"parser_class": parser})


class LooksForCallsAlways(HermesDialect):
    def parser(self, request: DialectRequest) -> DialectParser:
        return TextParser(DialectRequest(tools=(Tool(name="any"),)), hermes.THINK, hermes.SYNTAX)


class IgnoresThePrompt(HermesDialect):
    def parser(self, request: DialectRequest) -> DialectParser:
        return super().parser(replace(request, prompt_tail=""))


class OverlooksThatReasoningEnded(HermesDialect):
    def parser(self, request: DialectRequest) -> DialectParser:
        return super().parser(replace(request, prompt_tail=request.prompt_tail.replace("</think>", "")))


class HasOneParser(HermesDialect):
    one: DialectParser | None = None

    def parser(self, request: DialectRequest) -> DialectParser:
        self.one = self.one or super().parser(request)
        return self.one


class Endless(Shape):
    """Waits for a match as long as it may."""

    def held(self, text: str) -> int:
        found = self._begun.search(text)
        assert found is not None
        return found.start()


_NAME = seq(SPACE, lit("{"), SPACE, lit('"name"'), SPACE, lit(":"), SPACE, json_string("json_name"), SPACE)
_ARGUMENTS = seq(lit(","), SPACE, lit('"arguments"'), SPACE, lit(":"), SPACE, lit("{"))


class WaitsForNames(HermesDialect):
    def parser(self, request: DialectRequest) -> DialectParser:
        start = Endless(seq(LINE_BREAK, lit("<tool_call>"), _NAME, alt(_ARGUMENTS, lit("}"))))
        return TextParser(request, hermes.THINK, replace(hermes.SYNTAX, start=start))


class EscapesNames(HermesDialect):
    """Writes a call's name, and the model's own JSON, in another form than it reads."""

    def render_message(self, message: AssistantMessage) -> str:
        calls = tuple(ToolCall(name=f"{call.name} ", arguments=call.arguments) for call in message.calls)
        return super().render_message(replace(message, calls=calls))


class ForgetsItsMarkers(HermesDialect):
    markers = ()


class LeavesChoicesToTheModel(HermesDialect):
    """A grammar for strict tools alone: required calls need not come."""

    def grammar(self, request: DialectRequest) -> str | None:
        return super().grammar(replace(request, choice=replace(request.choice, mode="auto")))


class BindsStrictToolsOnly(HermesDialect):
    def grammar(self, request: DialectRequest) -> str | None:
        return super().grammar(request) if any(tool.strict for tool in request.tools) else None


class AllowsSeveralCalls(HermesDialect):
    def grammar(self, request: DialectRequest) -> str | None:
        return super().grammar(replace(request, choice=replace(request.choice, parallel=True)))


class AllowsAllTools(HermesDialect):
    def grammar(self, request: DialectRequest) -> str | None:
        return super().grammar(replace(request, choice=replace(request.choice, allowed=frozenset())))


class ForgetsThatModelsReason(HermesDialect):
    def grammar(self, request: DialectRequest) -> str | None:
        return super().grammar(replace(request, reasoning=False))


class LetsTheModelReason(HermesDialect):
    def grammar(self, request: DialectRequest) -> str | None:
        return super().grammar(replace(request, reasoning=True))


class SpellsItsTokens(HermesDialect):
    """Writes special tokens as text, which no model that has the tokens writes."""

    def grammar(self, request: DialectRequest) -> str | None:
        return HermesDialect(self.options, replace(self.setup, special_tokens={})).grammar(request)


class TakesAnyArguments(HermesDialect):
    """Also such as are no object, which are no calls to its parser."""

    def grammar(self, request: DialectRequest) -> str | None:
        grammar = super().grammar(replace(request, tools=tuple(replace(tool, strict=False) for tool in request.tools)))
        return None if grammar is None else grammar.replace('%json {"type": "object"}', "%json {}")


class IgnoresFormats(HermesDialect):
    def grammar(self, request: DialectRequest) -> str | None:
        return super().grammar(replace(request, response_format="/(.|\\n)*/" if request.response_format else None))


BACK = "test_what_is_rendered_parses_back"
CHOICE = "test_the_grammar_keeps_to_the_choice"
RENDERED = "test_the_grammar_accepts_what_is_rendered"
REASONING = "test_the_grammar_keeps_to_the_reasoning"
FAULTS = [
    Fault("parses each piece by itself", parses_by(ForgetsPieces), "test_pieces_do_not_matter"),
    Fault("shows nothing before the end", parses_by(WaitsForTheEnd), "test_prose_is_not_held_back"),
    Fault("shows arguments when they are complete", parses_by(KeepsArguments), "test_arguments_are_not_held_back"),
    Fault("reads numbers as floats", parses_by(RoundsNumbers), BACK),
    Fault("tidies white space", parses_by(StripsContent), BACK),
    Fault("loses digits", parses_by(LosesDigits), "test_no_text_is_lost_or_shown_twice"),
    Fault(
        "drops what follows a broken call",
        parses_by(DropsWhatFollowsABrokenCall),
        "test_arguments_that_break_off_end_the_call",
    ),
    Fault("shows broken calls twice", parses_by(ShowsBrokenCallsTwice), "test_arguments_that_break_off_end_the_call"),
    Fault(
        "calls what was cut off complete",
        parses_by(CallsAllComplete),
        "test_truncated_output_says_which_call_is_incomplete[1]",
    ),
    Fault("calls broken arguments complete", parses_by(CallsAllComplete), "test_complete_arguments_are_json_objects"),
    Fault(
        "does not end calls that are cut off",
        parses_by(NeverEndsCutCalls),
        "test_truncated_output_says_which_call_is_incomplete[1]",
    ),
    Fault(
        "passes half a character on",
        parses_by(PassesHalvesOn),
        "test_halves_of_characters_are_not_passed_on[\\\\ud83e]",
    ),
    Fault("drops calls of unknown tools", parses_by(KnowsItsToolsOnly), "test_calls_of_unknown_tools_are_calls"),
    Fault("sends empty deltas", parses_by(SaysNothingAtLength), "test_pieces_do_not_matter"),
    Fault("counts calls from 1", parses_by(CountsFromOne), BACK),
    Fault("finds calls where none may be", LooksForCallsAlways, "test_without_calls_markup_is_content"),
    Fault(
        "does not see that the prompt opened the reasoning",
        IgnoresThePrompt,
        "test_goes_on_in_reasoning_that_the_prompt_opened",
    ),
    Fault(
        "does not see that the prompt closed it",
        OverlooksThatReasoningEnded,
        "test_answers_where_the_prompt_closed_the_reasoning",
    ),
    Fault("has one parser for all", HasOneParser, "test_parsers_share_nothing"),
    Fault("waits for names without end", WaitsForNames, "test_a_head_that_is_too_long_is_content"),
    Fault("writes names otherwise than it reads them", EscapesNames, BACK),
    Fault("does not declare its markers", ForgetsItsMarkers, "test_declares_its_contract"),
    Fault("ignores that calls are required", LeavesChoicesToTheModel, CHOICE),
    Fault("binds strict tools only", BindsStrictToolsOnly, f"{RENDERED}[loose-required-markers_are_text]"),
    Fault("allows several calls where one may be", AllowsSeveralCalls, CHOICE),
    Fault("allows the tools that it is not to call", AllowsAllTools, CHOICE),
    Fault("accepts no reasoning before a call", ForgetsThatModelsReason, REASONING),
    Fault("lets a model reason that may not", LetsTheModelReason, REASONING),
    Fault("spells special tokens", SpellsItsTokens, f"{RENDERED}[strict-required-markers_are_tokens]"),
    Fault("takes arguments that it does not read", TakesAnyArguments, "test_what_the_grammar_accepts_parses"),
    Fault("takes any response", IgnoresFormats, "test_the_grammar_keeps_to_a_response_format"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_dialect_that(fault: Fault) -> None:
    check_fault(fault, DialectSuite, plugin=fault.plugin)


class Unchanged(Faulty):
    """The dialect that the faults are in."""


def test_what_is_changed_is_sound_without_the_change() -> None:
    dialect = Unchanged(Unchanged.Options(), DialectSetup())
    message = AssistantMessage(content="So.", calls=(ToolCall(name="add", arguments="{}"),))
    parser = dialect.parser(DialectRequest(tools=(Tool(name="add"),)))
    assert message_of(parser.push(dialect.render_message(message)) + parser.finish()) == message
