"""The parts without HTTP: conversations, blocks, deltas, grammars of a turn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.dialect import (
    AssistantMessage,
    Dialect,
    DialectCapabilities,
    DialectParser,
    DialectRequest,
    DialectSetup,
    Tool,
    ToolCall,
    ToolChoice,
)
from dovetail.contracts.errors import RequestError
from dovetail.contracts.outputs import CompletionOutput
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import APIError
from dovetail.plugins.dialects.hermes import HermesDialect
from dovetail.plugins.routes.chat.deltas import delta_of, message_data
from dovetail.plugins.routes.messages.conversation import openai_messages as from_anthropic
from dovetail.plugins.routes.responses.items import openai_messages as from_items
from dovetail.plugins.server.turns.blocks import Blocks
from dovetail.plugins.server.turns.messages import template_messages
from dovetail.plugins.server.turns.reading import TurnReader
from dovetail.plugins.server.turns.tools import tool_set

TOOLS = (Tool(name="f"),)
REQUEST = DialectRequest(tools=TOOLS)
HERMES = HermesDialect(PluginOptions(), DialectSetup())
WORDS = st.text('ab<>/\n {}"é', max_size=12)
MESSAGES = st.builds(
    AssistantMessage,
    reasoning=WORDS,
    content=WORDS,
    calls=st.lists(
        st.builds(ToolCall, name=st.just("f"), arguments=st.sampled_from(["{}", '{"a": "<x>"}'])), max_size=3
    ).map(tuple),
)


def completions(pieces: list[str], reason: str) -> list[CompletionOutput]:
    outputs = [CompletionOutput(0, piece, []) for piece in pieces]
    return [*outputs, CompletionOutput(0, "", [], finish_reason=reason)]


@given(message=MESSAGES, data=st.data(), is_cut=st.booleans())
def test_blocks_do_not_depend_on_pieces(message: AssistantMessage, data: st.DataObject, is_cut: bool) -> None:
    text = HERMES.render_message(message)
    if is_cut:
        text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = []
    for given_pieces in ([text], pieces):
        reader, blocks = TurnReader(HERMES, REQUEST), Blocks()
        events = []
        for completion in completions(given_pieces, "length" if is_cut else "stop"):
            events += blocks.add(reader.read(completion))
        events += blocks.finish("length" if is_cut else "stop")
        found.append([(block.kind, block.name, block.text, block.ending) for block in blocks.blocks])
        assert len([event for event in events if type(event).__name__ == "BlockBegin"]) == len(blocks.blocks)
        assert len([event for event in events if type(event).__name__ == "BlockEnd"]) == len(blocks.blocks)
    assert found[0] == found[1]


def test_a_delta_has_all_that_came_together() -> None:
    reader = TurnReader(HERMES, REQUEST)
    text = '<think>\nHm.\n</think>\n\nYes.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    delta = delta_of(reader.read(CompletionOutput(0, text, [], finish_reason="stop")))
    (call,) = delta.pop("tool_calls")
    assert delta == {"reasoning_content": "Hm.", "reasoning": "Hm.", "content": "Yes."}
    assert (call["index"], call["function"]) == (0, {"name": "f", "arguments": '{"a": 1}'})
    assert reader.finish_reason("stop") == "tool_calls"


def test_a_message_that_only_calls_has_no_content() -> None:
    call = ToolCall(name="f", arguments="{}", call_id="abcdefghi")
    assert message_data(AssistantMessage(calls=(call,)))["content"] is None
    assert message_data(AssistantMessage())["content"] == ""


def test_conversations_of_all_endpoints_are_one_conversation() -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    openai: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "reasoning": "Hm.", "content": "Yes.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "done"},
    ]
    anthropic: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Yes."},
                {"type": "tool_use", "id": "abcdefghi", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "abcdefghi", "content": "done"}]},
    ]
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "abcdefghi", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "abcdefghi", "output": "done"},
    ]

    def plain(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """With text in one part as text."""
        found = template_messages(messages)
        for message in found:
            if isinstance(message.get("content"), list):
                (message["content"],) = [part["text"] for part in message["content"]]
        return found

    assert plain(from_anthropic("Be kind.", anthropic)) == plain(openai)
    assert plain(from_items("Be kind.", items)) == plain(openai)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages.0.role"),
        ({"role": "user", "content": 1}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages.0.content.0.type"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        ({"role": "function", "content": "x"}, "messages.0"),
    ],
)
def test_a_message_that_is_refused_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(APIError) as caught:
        template_messages([message])
    assert caught.value.param == param


def test_the_model_does_not_see_strict() -> None:
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True, "description": None}
    found = tool_set([{"type": "function", "function": function}], "required", False)
    assert found.shown == ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)
    assert found.tools == (Tool(name="f", parameters={"type": "object"}, strict=True),)
    assert found.choice == ToolChoice(mode="required", parallel=False)


class Loose(Dialect):
    """Has tools, and no grammars."""

    contract = (1, 0)
    capabilities = DialectCapabilities(tools=True, parallel_calls=True)

    def parser(self, request: DialectRequest) -> DialectParser:
        raise NotImplementedError

    def render_message(self, message: AssistantMessage) -> str:
        raise NotImplementedError


def test_a_dialect_without_grammars_refuses_what_it_cannot_keep_to() -> None:
    dialect = Loose(PluginOptions(), DialectSetup())
    dialect.validate(DialectRequest(tools=TOOLS))
    for choice in (ToolChoice(parallel=False), ToolChoice(mode="required")):
        with pytest.raises(RequestError, match="writes no grammars"):
            dialect.validate(DialectRequest(tools=TOOLS, choice=choice))
