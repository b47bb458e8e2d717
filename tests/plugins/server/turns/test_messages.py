"""/v1/messages, with Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.contracts.dialect import AssistantMessage, ToolCall
from dovetail.engine.dialects import create_dialect
from dovetail.plugins.routes.messages.request import MessagesRequest

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def client(hermes: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=hermes.server.url, api_key="none", max_retries=0) as created:
        yield created


def ask(served: Any, text: str, **body: Any) -> dict[str, Any]:
    """Keyword arguments of a call that has the model say this."""
    return {"model": "tiny", "messages": HELLO, "max_tokens": 400, "extra_body": served.says(text), **body}


def shown(message: Any) -> list[dict[str, Any]]:
    keys = ("type", "text", "thinking", "name", "input")
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    return [{key: block[key] for key in keys if key in block} for block in blocks]


def test_thinking_text_and_tools(client: anthropic.Anthropic, hermes: Any) -> None:
    asked = ask(hermes, f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}", tools=TOOLS)
    message = client.messages.create(**asked)
    expected = [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}},
    ]
    assert shown(message) == expected
    assert message.stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert shown(streamed) == expected
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", message.usage.output_tokens)
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    hidden = client.messages.create(**asked, thinking={"type": "disabled"})
    assert shown(hidden) == expected[1:]


def test_the_model_sees_the_whole_conversation(client: anthropic.Anthropic, hermes: Any) -> None:
    messages: list[Any] = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "abcdefghi", "name": "get_weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "abcdefghi", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system: list[Any] = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    counted = client.messages.count_tokens(model="tiny", messages=messages, system=system)
    prompt = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\nHm.\n</think>\n\nOne moment.\n{CALL}<|im_end|>\n"
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert counted.input_tokens == len(hermes.post("/tokenize", {"prompt": prompt})["tokens"])


def test_a_last_message_of_the_assistant_is_continued(client: anthropic.Anthropic, hermes: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I say"}]
    message = client.messages.create(**ask(hermes, " hello.", messages=messages))
    assert shown(message) == [{"type": "text", "text": " hello."}]


def test_a_stop_sequence_is_told(client: anthropic.Anthropic, hermes: Any) -> None:
    message = client.messages.create(**ask(hermes, "One, two, three", stop_sequences=["two"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")
    assert shown(message) == [{"type": "text", "text": "One, "}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages.0.role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "tool", "name": "b"}}, "tool_choice"),
        ({"stop_sequences": ["a"] * 1025}, "stop_sequences"),
        ({"extra_body": {"container": "x"}}, "container"),
    ],
)
def test_what_is_refused_is_named(client: anthropic.Anthropic, hermes: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{**ask(hermes, "x"), **body})
    error: Any = caught.value.body
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["param"] == param


WORDS = st.lists(
    st.sampled_from(["Paris", " ", "\n", "<", "<tool", "</think", "é", "🦊", '{"a": 1}', "x"]), max_size=8
).map("".join)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(reasoning=WORDS, content=WORDS, cities=st.lists(WORDS, max_size=2), num_tokens=st.integers(1, 150))
def test_what_is_streamed_is_what_is_whole(
    serve: Callable[[str], Any], reasoning: str, content: str, cities: list[str], num_tokens: int
) -> None:
    served = serve("hermes")
    dialect = create_dialect(served.engine.facts)
    assert dialect is not None
    calls = tuple(ToolCall(name="get_weather", arguments=json.dumps({"city": city})) for city in cities)
    text = dialect.render_message(AssistantMessage(reasoning=reasoning, content=content, calls=calls))
    asked = ask(served, text, tools=TOOLS, max_tokens=num_tokens)
    with anthropic.Anthropic(base_url=served.server.url, api_key="none", max_retries=0) as client:
        message = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    is_cut = [block.type == "tool_use" and "partial_json" in block.model_dump() for block in message.content]
    whole, parts = shown(message), shown(streamed)
    # Of arguments that are cut off, clients show what they can make of them.
    assert [b for b, cut in zip(whole, is_cut, strict=True) if not cut] == parts[: len(parts) - sum(is_cut)]
    assert [block["type"] for block in whole] == [block["type"] for block in parts]
    assert (message.stop_reason, message.usage.output_tokens) == (streamed.stop_reason, streamed.usage.output_tokens)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"metadata": {"user_id": "anthropic"}, "user": "openai"}, "anthropic"),
        ({"user": "older", "safety_identifier": "newer"}, "older"),
        ({"metadata": {}, "safety_identifier": "newer"}, "newer"),
        ({"metadata": {"user_id": 3}}, None),
        ({"user": ""}, None),
    ],
)
def test_whom_a_request_is_for(fields: dict[str, Any], expected: str | None) -> None:
    assert MessagesRequest(messages=[], **fields).end_user() == expected
