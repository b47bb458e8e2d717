"""Conformance suite of dialects. A third party's test is a subclass::

    from dovetail.testing import DialectSuite

    class TestMyDialect(DialectSuite):
        plugin = MyDialect

Messages are made by hypothesis; grammars run in llguidance (`pip install 'dovetail[testing]'` brings both). What the
capabilities do not declare is skipped by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dovetail.contracts.dialect import (
    MAX_HEAD,
    ArgumentsDelta,
    AssistantMessage,
    CallBegin,
    CallEnd,
    Dialect,
    DialectNeed,
    DialectParser,
    DialectRequest,
    DialectSetup,
    Event,
    TextDelta,
    ToolCall,
    ToolChoice,
    message_of,
)
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.testing.dialect_cases import (
    CHOICES,
    LOOSE_TOOLS,
    TOOLS,
    MessageMaker,
    cut,
    damaged,
    joined,
    parse,
    plain,
    shown,
    tokens_of,
    values_of,
)
from dovetail.testing.dialect_grammars import GrammarChecker, special_ids
from dovetail.testing.side_effects import leaves_alone
from dovetail.testing.suite import PluginSuite

REQUEST = DialectRequest(tools=TOOLS)
LONG = "All work and no play makes Jack a dull boy. " * 12
WALKS = 12
FORMAT = '%json {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}'

law = settings(
    max_examples=50,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
randoms = st.randoms(use_true_random=False)
as_tokens = pytest.mark.parametrize("special", [False, True], ids=["markers_are_text", "markers_are_tokens"])


class DialectSuite(PluginSuite):
    """What every dialect must do."""

    kind: ClassVar[str] = "dialect"
    plugin: ClassVar[type[Dialect]]
    options: ClassVar[Mapping[str, Any]] = {}

    def create(self, special: bool = True) -> Dialect:
        """The dialect over a tokenizer in which markers are special tokens, or plain text."""
        options: PluginOptions = self.plugin.Options.model_validate(dict(self.options))
        ids = special_ids(self.plugin.markers) if special else {}
        return self.plugin(options, DialectSetup(special_tokens=ids))

    def maker(self, random: Random, special: bool = False) -> MessageMaker:
        """Makes messages for the dialect. `special`: without markers in arguments, which a model that has tokens for
        them spells with others there."""
        can = self.plugin.capabilities
        can = replace(can, markers_in_arguments=can.markers_in_arguments and not special)
        return MessageMaker(random, can, self.plugin.markers)

    def example(self, num_calls: int = 1) -> str:
        """A rendered message of calls alone."""
        call = ToolCall(name="get_weather", arguments='{"query": "Rain or sun?", "days": 3}')
        return self.create().render_message(AssistantMessage(calls=(call,) * num_calls))

    def test_declares_its_contract(self) -> None:
        """Which contract it was written for, and markers for what it can do."""
        super().test_declares_its_contract()
        can = self.plugin.capabilities
        assert bool(self.plugin.markers) == (can.tools or can.reasoning)
        assert (self.plugin.reasoning_markers is not None) == can.reasoning
        for marker in self.plugin.reasoning_markers or ():
            assert marker.strip() in self.plugin.markers

    @law
    @given(random=randoms)
    def test_what_is_rendered_parses_back(self, random: Random) -> None:
        """Reasoning, content and calls; numbers are spelled as they were."""
        dialect, message = self.create(), self.maker(random).message()
        text = dialect.render_message(message)
        events = parse(dialect.parser(REQUEST), [text])
        check_order(events)
        assert plain(message_of(events)) == plain(message), text

    @law
    @given(random=randoms)
    def test_pieces_do_not_matter(self, random: Random) -> None:
        """Whole, in characters, in tokens and in any pieces, sound text and damaged."""
        dialect = self.create()
        text = dialect.render_message(self.maker(random).message())
        for written in (text, damaged(text, random)):
            whole = joined(parse(dialect.parser(REQUEST), [written]))
            for pieces in (list(written), tokens_of(written, dialect.markers), cut(written, random)):
                events = parse(dialect.parser(REQUEST), pieces)
                check_order(events)
                assert joined(events) == whole, (written, pieces)

    @law
    @given(random=randoms)
    def test_no_text_is_lost_or_shown_twice(self, random: Random) -> None:
        """Words between, in and behind what models get wrong are in the events, once."""
        dialect = self.create()
        text = damaged(dialect.render_message(self.maker(random).message()), random)
        events = parse(dialect.parser(REQUEST), cut(text, random))
        check_order(events)
        for word in re.findall(r"w\d{4}", text):
            if text.count(word) == 1:
                assert shown(events).count(word) == 1, (word, text, events)

    @law
    @given(random=randoms)
    def test_complete_arguments_are_json_objects(self, random: Random) -> None:
        """Whatever the model wrote, of a call that ends complete."""
        dialect = self.create()
        text = damaged(dialect.render_message(self.maker(random).message()), random)
        for call in message_of(parse(dialect.parser(REQUEST), list(text))).calls:
            if call.ending == "complete":
                assert isinstance(values_of(call.arguments), dict)

    def test_escapes_and_unicode_come_back(self) -> None:
        """In strings, keys of inner objects, and numbers that no float holds."""
        self.require("tools")
        dialect = self.create()
        arguments = (
            '{"query": "tab\\t quote\\" back\\\\slash \\u00e9 \\ud83e\\udd8a é 🦊 {} [] </a>\\n", '
            '"days": 123456789012345678901234567890, "share": 1.10, "filter": {"place": "a\\"b", "ids": [1, -0]}}'
        )
        message = AssistantMessage(calls=(ToolCall(name="get_weather", arguments=arguments),))
        events = parse(dialect.parser(REQUEST), list(dialect.render_message(message)))
        assert plain(message_of(events)) == plain(message)

    @pytest.mark.parametrize("half", ["\\ud83e", "\\udd8a", "\\ud83e\\ud83e", "\\ud83e\\n"])
    def test_halves_of_characters_are_not_passed_on(self, half: str) -> None:
        """A model can write half of a surrogate pair as an escape; no response can be encoded with one."""
        self.require("tools")
        dialect = self.create()
        call = ToolCall(name="get_weather", arguments='{"query": "w0001", "filter": {"place": "w0001"}}')
        text = dialect.render_message(AssistantMessage(calls=(call,)))
        for written in (text.replace("w0001", half), text.replace("get_weather", half)):
            for found in message_of(parse(dialect.parser(REQUEST), list(written))).calls:
                found.name.encode()
                if found.ending == "complete":
                    json.dumps(json.loads(found.arguments), ensure_ascii=False).encode()

    def test_calls_of_unknown_tools_are_calls(self) -> None:
        """The host decides what becomes of them."""
        self.require("tools")
        dialect = self.create()
        message = AssistantMessage(calls=(ToolCall(name="tell_time", arguments='{"query": "now"}'),))
        assert plain(message_of(parse(dialect.parser(REQUEST), [dialect.render_message(message)]))) == plain(message)

    @pytest.mark.parametrize(
        "request_", [DialectRequest(), DialectRequest(tools=TOOLS, choice=ToolChoice(mode="none"))]
    )
    def test_without_calls_markup_is_content(self, request_: DialectRequest) -> None:
        """Where no tool may be called."""
        self.require("tools")
        text = self.example()
        assert joined(parse(self.create().parser(request_), list(text))) == [TextDelta(text)]

    def test_parsers_share_nothing(self) -> None:
        """Two completions at once."""
        dialect, text = self.create(), self.create().render_message(self.maker(Random(5)).message(content=True))
        first, second = dialect.parser(REQUEST), dialect.parser(REQUEST)
        events: list[list[Event]] = [[], []]
        for char in text:
            events[0] += first.push(char)
            events[1] += second.push(char)
        alone = joined(parse(dialect.parser(REQUEST), [text]))
        assert [joined([*events[0], *first.finish()]), joined([*events[1], *second.finish()])] == [alone, alone]

    def test_leaves_alone_what_is_not_its_own(self) -> None:
        """Requests, messages, the random generators of the process."""
        dialect, message = self.create(), self.maker(Random(1)).message()
        with leaves_alone(REQUEST, message, dialect.setup):
            parse(dialect.parser(REQUEST), [dialect.render_message(message)])
            dialect.grammar(REQUEST)

    def test_answers_for_any_model(self) -> None:
        """`check` gives sentences, and raises for no model."""
        environment = Environment("cpu", 1, 2**30)
        options = self.plugin.Options.model_validate(dict(self.options))
        for template in (None, "", "{{ messages }}", " ".join(self.plugin.markers)):
            for named in (False, True):
                need = DialectNeed(
                    tools=False,
                    reasoning=False,
                    grammars=False,
                    is_named=named,
                    chat_template=template,
                    special_tokens=frozenset(),
                    architecture="",
                )
                assert all(isinstance(reason, str) for reason in self.plugin.check(need, options, environment))

    # Reasoning that the prompt opens.

    @law
    @given(random=randoms)
    def test_goes_on_in_reasoning_that_the_prompt_opened(self, random: Random) -> None:
        """The template wrote the first marker, and the model goes on behind it."""
        self.require("reasoning")
        dialect, opening = self.create(), self.opening()
        message = self.maker(random).message()
        if not message.reasoning:
            return
        text = dialect.render_message(message).removeprefix(opening)
        request = DialectRequest(tools=TOOLS, prompt_tail=f"<|assistant|>\n{opening}")
        events = parse(dialect.parser(request), cut(text, random))
        assert plain(message_of(events)) == plain(message), text

    def test_answers_where_the_prompt_closed_the_reasoning(self) -> None:
        """The template wrote both markers, with nothing between."""
        self.require("reasoning")
        tail = "".join(self.plugin.reasoning_markers or ())
        parser = self.create().parser(DialectRequest(prompt_tail=f"<|assistant|>\n{tail}"))
        assert message_of(parse(parser, ["At once."])) == AssistantMessage(content="At once.")

    def test_reasoning_that_never_ends_is_reasoning(self) -> None:
        """Cut off by max_tokens."""
        self.require("reasoning")
        parser = self.create().parser(DialectRequest())
        assert message_of(parse(parser, [self.opening() + LONG])) == AssistantMessage(reasoning=LONG)

    def opening(self) -> str:
        """What reasoning begins with."""
        markers = self.plugin.reasoning_markers
        assert markers is not None
        return markers[0]

    # What is held back, and what is cut off.

    @law
    @given(random=randoms)
    def test_text_is_not_held_back(self, random: Random) -> None:
        """Of content and reasoning no more than the longest marker."""
        dialect = self.create()
        longest = max(map(len, dialect.markers), default=0)
        text = self.maker(random).text() + LONG
        for before in ["", *([self.opening()] if dialect.capabilities.reasoning else [])]:
            parser = dialect.parser(REQUEST)
            parser.push(before)
            check_held(parser, text, longest)

    def test_prose_is_not_held_back(self) -> None:
        """Text in which nothing begins a marker comes out at once."""
        parser = self.create().parser(REQUEST)
        check_held(parser, LONG, 0)

    def test_arguments_are_not_held_back(self) -> None:
        """A long string in them comes as the model writes it."""
        self.require("tools")
        dialect = self.create()
        longest = max(map(len, dialect.markers))
        message = AssistantMessage(calls=(ToolCall(name="get_weather", arguments=f'{{"query": "{LONG}", "days": 1}}'),))
        text = dialect.render_message(message)
        parser, begin = dialect.parser(REQUEST), text.index(LONG)
        parser.push(text[:begin])
        check_held(parser, LONG, longest)

    def test_a_head_that_is_too_long_is_content(self) -> None:
        """A name without end is shown while it comes."""
        self.require("tools")
        dialect, name = self.create(), "n" * (3 * MAX_HEAD)
        text = dialect.render_message(AssistantMessage(calls=(ToolCall(name=name, arguments="{}"),)))
        events = parse(dialect.parser(REQUEST), list(text))
        assert not [event for event in events if isinstance(event, CallBegin)]
        assert name in shown(events)
        check_held(dialect.parser(REQUEST), text[: text.index(name) + len(name)], MAX_HEAD)

    @pytest.mark.parametrize("num_calls", [1, 2])
    def test_truncated_output_says_which_call_is_incomplete(self, num_calls: int) -> None:
        """Cut off anywhere: calls before are complete, the one that was cut is not, and nothing else is wrong."""
        self.require("tools")
        if num_calls > 1:
            self.require("parallel_calls")
        text, dialect = self.example(num_calls), self.create()
        seen = set()
        for end in range(len(text) + 1):
            events = parse(dialect.parser(REQUEST), [text[:end]])
            check_order(events)
            endings = [call.ending for call in message_of(events).calls]
            assert endings[:-1] == ["complete"] * len(endings[:-1]), text[:end]
            seen |= {(len(endings), endings[-1])} if endings else set()
        assert {(count + 1, ending) for count in range(num_calls) for ending in ("truncated", "complete")} == seen

    def test_arguments_that_break_off_end_the_call(self) -> None:
        """And nothing of them is lost, or shown twice."""
        self.require("tools")
        dialect = self.create()
        arguments = '{"filter": {"place": "w0001", "ids": [1]}}'
        text = dialect.render_message(AssistantMessage(calls=(ToolCall(name="get_weather", arguments=arguments),)))
        broken = text.replace("[1]", "[1] w0002 ")
        events = parse(dialect.parser(REQUEST), list(broken))
        assert CallEnd(0, "malformed") in events, broken
        assert [shown(events).count(word) for word in ("w0001", "w0002")] == [1, 1]

    # Grammars.

    @as_tokens
    @pytest.mark.parametrize("choice", CHOICES)
    @pytest.mark.parametrize("tools", [TOOLS, LOOSE_TOOLS], ids=["strict", "loose"])
    def test_the_grammar_accepts_what_is_rendered(self, choice: str, tools: Any, special: bool) -> None:
        """For every choice of tools."""
        self.require("tools", "grammars")
        dialect = self.create(special)
        request = DialectRequest(tools=tools, choice=CHOICES[choice])
        grammar = dialect.grammar(request)
        if choice == "auto" and tools is LOOSE_TOOLS:
            assert grammar is None, "nothing binds the model"
            return
        assert grammar is not None, f"nothing keeps the model to {choice}"
        checker = GrammarChecker(grammar, dialect.setup.special_tokens, dialect.markers)
        for seed in range(20):
            message = self.fitting(choice, self.maker(Random(seed), special))
            text = dialect.render_message(message)
            assert checker.accepts(text), f"of {text!r} it takes {checker.furthest(text)!r}\n{grammar}"

    def fitting(self, choice: str, maker: MessageMaker) -> AssistantMessage:
        """A message as the choice wants it."""
        if choice == "auto":
            return maker.message()
        one_only = choice in ("single", "named") or not self.plugin.capabilities.parallel_calls
        message = maker.message(content=choice in ("single", "allowed"), most_calls=0)
        name = "get_weather" if choice in ("named", "allowed") else None
        calls = tuple(maker.call(name) for _ in range(1 if one_only else maker.random.randint(1, 3)))
        return AssistantMessage(reasoning=message.reasoning, content=message.content, calls=calls)

    @as_tokens
    def test_the_grammar_keeps_to_the_choice(self, special: bool) -> None:
        """Calls that must be there, tools that were not named, second calls, arguments that do not fit."""
        self.require("tools", "grammars")
        dialect = self.create(special)
        weather = ToolCall(name="get_weather", arguments='{"query": "x", "days": 1}')
        ping = ToolCall(name="ping", arguments="{}")
        wrong = ToolCall(name="get_weather", arguments='{"query": "x", "days": true}')
        unknown = ToolCall(name="tell_time", arguments="{}")
        refused: dict[str, list[tuple[ToolCall, ...]]] = {
            "auto": [(wrong,), (unknown,)],
            "single": [(ping, ping), (wrong,)],
            "required": [(), (wrong,), (unknown,)],
            "named": [(), (ping,), (wrong,)],
            "allowed": [(ping,), (wrong,)],
        }
        for choice, messages in refused.items():
            checker = self.checker(dialect, DialectRequest(tools=TOOLS, choice=CHOICES[choice]))
            assert checker.accepts(dialect.render_message(AssistantMessage(calls=(weather,)))), choice
            for calls in messages:
                text = dialect.render_message(AssistantMessage(content="" if calls else "No.", calls=calls))
                assert not checker.accepts(text), f"{choice} accepts {text!r}"

    @as_tokens
    def test_the_grammar_keeps_to_the_reasoning(self, special: bool) -> None:
        """None where there may be none; its end where the prompt opened it."""
        self.require("reasoning", "grammars")
        dialect = self.create(special)
        thought = dialect.render_message(AssistantMessage(reasoning="Well.", content=""))
        answer = '{"answer": "yes"}'
        without = self.checker(dialect, DialectRequest(response_format=FORMAT, reasoning=False))
        assert without.accepts(answer)
        assert not without.accepts(thought + answer)
        checker = self.checker(dialect, DialectRequest(response_format=FORMAT))
        assert checker.accepts(answer)
        assert checker.accepts(thought + answer)
        opened = self.checker(dialect, DialectRequest(response_format=FORMAT, prompt_tail=self.opening()))
        assert opened.accepts(thought.removeprefix(self.opening()) + answer)
        assert not opened.accepts(answer)

    @as_tokens
    def test_the_grammar_keeps_to_a_response_format(self, special: bool) -> None:
        """With tools and without; the content comes back whole."""
        self.require("grammars")
        dialect = self.create(special)
        tools = TOOLS if dialect.capabilities.tools else ()
        answer = '{"answer": "{\\"x\\": 1} <b>"}'
        for request in (DialectRequest(response_format=FORMAT), DialectRequest(tools=tools, response_format=FORMAT)):
            checker = self.checker(dialect, request)
            assert checker.accepts(answer)
            assert not checker.accepts("Yes.")
            assert not checker.accepts('{"answer": 1}')
            assert checker.accepts(self.example()) if request.tools else True
            assert message_of(parse(dialect.parser(request), list(answer))) == AssistantMessage(content=answer)

    @as_tokens
    @pytest.mark.parametrize("choice", CHOICES)
    def test_what_the_grammar_accepts_parses(self, choice: str, special: bool) -> None:
        """Random walks through it: whole calls of the tools, whose arguments fit, and nothing lost."""
        self.require("tools", "grammars")
        dialect = self.create(special)
        request = DialectRequest(tools=TOOLS, choice=CHOICES[choice])
        checker = self.checker(dialect, request)
        num_calls = 0
        for seed in range(WALKS):
            text, is_whole = checker.walk(Random(seed))
            message = message_of(parse(dialect.parser(request), list(text)))
            if not is_whole:
                continue
            num_calls += len(message.calls)
            for call in message.calls:
                assert call.ending == "complete", text
                assert call.name in (CHOICES[choice].allowed or {tool.name for tool in TOOLS}), text
                values = values_of(call.arguments)
                assert isinstance(values, dict), text
                if call.name == "get_weather":
                    assert type(values["query"]) is str, text
                    assert values["days"].lstrip("-").isdigit(), text
            assert message.calls or choice in ("auto", "single", "allowed"), text
            assert len(message.calls) < 2 or choice in ("auto", "required", "allowed"), text
            if any(marker in message.reasoning + message.content for marker in dialect.markers):
                continue
            again = dialect.render_message(message)
            assert plain(message_of(parse(dialect.parser(request), [again]))) == plain(message), text
        assert num_calls, "no walk came upon a call"

    def checker(self, dialect: Dialect, request: DialectRequest) -> GrammarChecker:
        """The grammar of a request that binds the model."""
        grammar = dialect.grammar(request)
        assert grammar is not None, f"nothing keeps the model to {request}"
        return GrammarChecker(grammar, dialect.setup.special_tokens, dialect.markers)


def check_order(events: list[Event]) -> None:
    """Asserts that calls come one after another, each with its begin and its end, and that no delta is empty."""
    begun, open_index = 0, None
    for event in events:
        if isinstance(event, CallBegin):
            assert (open_index, event.index) == (None, begun), events
            open_index, begun = event.index, begun + 1
        elif isinstance(event, ArgumentsDelta | CallEnd):
            assert event.index == open_index, events
            open_index = None if isinstance(event, CallEnd) else open_index
        else:
            assert open_index is None, events
        assert isinstance(event, CallBegin | CallEnd) or event.text, events
    assert open_index is None, events


def check_held(parser: DialectParser, text: str, most: int) -> None:
    """Asserts that of the text, character by character, no more than `most` was ever held back."""
    length = 0
    for number, char in enumerate(text, 1):
        for event in parser.push(char):
            length += len(event.text) if not isinstance(event, CallBegin | CallEnd) else 0
        assert number - length <= most, f"{number - length} characters are held back of {text[:number][-80:]!r}"
