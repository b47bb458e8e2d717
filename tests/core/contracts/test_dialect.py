from __future__ import annotations

from typing import ClassVar

import pytest

from dovetail.contracts.dialect import (
    ArgumentsDelta,
    AssistantMessage,
    CallBegin,
    CallEnd,
    Dialect,
    DialectCapabilities,
    DialectNeed,
    DialectParser,
    DialectRequest,
    DialectSetup,
    ReasoningDelta,
    TextDelta,
    Tool,
    ToolCall,
    ToolChoice,
    message_of,
)
from dovetail.contracts.errors import RequestError
from dovetail.contracts.needs import reasons_against
from dovetail.contracts.plugin import Environment, PluginOptions

ADD, SUB = Tool(name="add"), Tool(name="sub")


class Quiet(Dialect):
    """Declares nothing."""

    contract = (1, 0)

    def parser(self, request: DialectRequest) -> DialectParser:
        raise NotImplementedError

    def render_message(self, message: AssistantMessage) -> str:
        return message.content


class Calling(Quiet):
    capabilities: ClassVar[DialectCapabilities] = DialectCapabilities(tools=True)


class Binding(Quiet):
    capabilities: ClassVar[DialectCapabilities] = DialectCapabilities(tools=True, grammars=True)


def created(dialect: type[Dialect]) -> Dialect:
    return dialect(PluginOptions(), DialectSetup())


@pytest.mark.parametrize(
    ("dialect", "request_", "words"),
    [
        (Quiet, DialectRequest(tools=(ADD,)), "dialect unnamed has no tool calls"),
        (Calling, DialectRequest(choice=ToolChoice(mode="required")), "required needs tools"),
        (Calling, DialectRequest(tools=(ADD,), choice=ToolChoice(mode="required")), "writes no grammars"),
        (Calling, DialectRequest(tools=(Tool(name="add", strict=True),)), "writes no grammars"),
        (Calling, DialectRequest(response_format="/yes|no/"), "writes no grammars"),
        (Binding, DialectRequest(tools=(ADD, SUB), choice=ToolChoice(mode="named", name="mul")), "'mul'.* add, sub"),
        (Binding, DialectRequest(tools=(ADD,), choice=ToolChoice(allowed=frozenset({"mul"}))), "allows 'mul'.* add"),
        (Calling, DialectRequest(tools=(ADD,), choice=ToolChoice(allowed=frozenset({"add"}))), "writes no grammars"),
        (Binding, DialectRequest(tools=(ADD, ADD)), "two tools have one name"),
    ],
    ids=str,
)
def test_requests_that_a_dialect_cannot_serve_are_refused(dialect, request_, words):
    with pytest.raises(RequestError, match=words):
        created(dialect).validate(request_)


@pytest.mark.parametrize(
    ("dialect", "request_"),
    [
        (Quiet, DialectRequest(tools=(ADD,), choice=ToolChoice(mode="none"))),
        (Calling, DialectRequest(tools=(ADD, SUB))),
        (Binding, DialectRequest(tools=(ADD,), choice=ToolChoice(mode="named", name="add"))),
    ],
    ids=str,
)
def test_requests_that_a_dialect_can_serve_pass(dialect, request_):
    created(dialect).validate(request_)


@pytest.mark.parametrize("asked", ["tools", "reasoning", "grammars"])
def test_a_dialect_that_declares_nothing_is_refused_with_a_sentence(asked):
    need = DialectNeed(
        **{"tools": False, "reasoning": False, "grammars": False, asked: True},
        is_named=True,
        chat_template=None,
        special_tokens=frozenset(),
        architecture="",
    )
    [reason] = reasons_against(Quiet, need, PluginOptions(), Environment("cpu", 1, 2**30))
    assert reason.startswith("Quiet ")
    assert reason.endswith("choose another dialect.")


def test_a_message_is_what_its_events_amount_to():
    events = [
        ReasoningDelta("hm"),
        TextDelta("a"),
        CallBegin(0, "add", "id1"),
        ArgumentsDelta(0, "{"),
        ArgumentsDelta(0, "}"),
        CallEnd(0),
        TextDelta("b"),
        CallBegin(1, "sub"),
        CallEnd(1, "truncated"),
    ]
    calls = (
        ToolCall(name="add", arguments="{}", call_id="id1"),
        ToolCall(name="sub", arguments="", ending="truncated"),
    )
    assert message_of(events) == AssistantMessage(reasoning="hm", content="ab", calls=calls)


def test_markers_that_are_special_tokens_are_kept():
    class Marked(Quiet):
        markers: ClassVar[tuple[str, ...]] = ("<a>", "<b>")

    setup = DialectSetup(special_tokens={"<b>": 5, "<eos>": 6})
    assert Marked(PluginOptions(), setup).kept_tokens == {"<b>"}
