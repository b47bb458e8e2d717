"""/v1/responses, with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dovetail.contracts.dialect import AssistantMessage, ToolCall
from dovetail.engine.dialects import create_dialect
from dovetail.plugins.routes.responses.route import ResponsesOptions, ResponsesRoute
from dovetail.plugins.routes.responses.store import ResponseStore
from dovetail.plugins.server.live import live_server

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def client(hermes: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hermes.server.url}/v1", api_key="none", max_retries=0) as created:
        yield created


def ask(served: Any, text: str, **body: Any) -> dict[str, Any]:
    """Keyword arguments of a call that has the model say this."""
    return {"model": "tiny", "input": "Hello", "extra_body": served.says(text), **body}


def without_times(response: Any) -> dict[str, Any]:
    data: dict[str, Any] = response.model_dump()
    for item in data["output"]:
        item["id"] = None
        item.pop("call_id", None)
    return {key: value for key, value in data.items() if key in ("status", "output", "usage", "incomplete_details")}


def test_reasoning_text_and_calls(client: openai.OpenAI, hermes: Any) -> None:
    response = client.responses.create(**ask(hermes, f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}", tools=TOOLS))
    reasoning, message, call = response.output
    assert (reasoning.type, message.type, call.type) == ("reasoning", "message", "function_call")
    assert reasoning.content[0].text == "Hm."  # type: ignore[union-attr,index]
    assert response.output_text == "Let me see."
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Paris"}')  # type: ignore[union-attr]
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len("Hm.")


def test_a_conversation_goes_on_from_a_response(client: openai.OpenAI, hermes: Any) -> None:
    first = client.responses.create(
        **ask(hermes, f"<think>\nHm.\n</think>\n\n{CALL}", tools=TOOLS, instructions="Be kind.")
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    result: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    second = client.responses.create(**ask(hermes, "It is sunny.", input=result, previous_response_id=first.id))
    prompt = (
        f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\n\n{CALL}<|im_end|>\n"
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second.usage is not None
    assert second.usage.input_tokens == len(hermes.post("/tokenize", {"prompt": prompt})["tokens"])
    # The same with all items.
    items: list[Any] = [{"role": "user", "content": "Hello"}, *(item.model_dump() for item in first.output), *result]
    again = client.responses.create(**ask(hermes, "It is sunny.", input=items, store=False))
    assert again.usage is not None
    assert again.usage.input_tokens == second.usage.input_tokens


def test_a_response_is_kept_until_it_is_deleted(client: openai.OpenAI, hermes: Any) -> None:
    with client.responses.stream(**ask(hermes, "Kept.")) as stream:
        stream.until_done()
        response = stream.get_final_response()
    assert client.responses.retrieve(response.id).output_text == "Kept."
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(**ask(hermes, "x", previous_response_id=response.id))
    assert caught.value.param == "previous_response_id"


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI, hermes: Any) -> None:
    response = client.responses.create(**ask(hermes, "Gone.", store=False))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_with_several_api_processes_nothing_is_kept(hermes: Any) -> None:
    with live_server(hermes.engine, {"responses": (ResponsesRoute, ResponsesOptions())}, model_names=("tiny",)) as live:
        live.host.num_api_processes = 2
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            response = client.responses.create(**ask(hermes, "Hello."))
            assert response.model_dump()["store"] is False
            for body in ({"store": True}, {"previous_response_id": response.id}):
                with pytest.raises(openai.BadRequestError, match="2, any of which"):
                    client.responses.create(**ask(hermes, "x", **body))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ],
)
def test_what_is_refused_is_named(client: openai.OpenAI, hermes: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{**ask(hermes, "x"), **body})
    assert str(caught.value.param).startswith(param)


THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.mark.parametrize("text", ["Let me see.", f"{THOUGHT}Hm. So é🦊.", f"{THOUGHT}\nSo.\n{CALL}", CALL])
def test_text_comes_with_the_log_probabilities_of_its_tokens(client: openai.OpenAI, hermes: Any, text: str) -> None:
    body = ask(hermes, text, tools=TOOLS, include=["message.output_text.logprobs"], top_logprobs=2)
    response = client.responses.create(**body)
    parts = [part for item in response.output if item.type == "message" for part in item.content]
    for part in parts:
        entries = part.logprobs or []  # type: ignore[union-attr]
        written = b"".join(bytes(entry.bytes) if entry.bytes is not None else b"?" for entry in entries)
        shown = part.text.encode()  # type: ignore[union-attr]
        assert written == shown if shown.isascii() else len(written) >= len(part.text)  # type: ignore[union-attr]
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert bool(parts) == (text != CALL)
    events = list(client.responses.create(**body, stream=True))
    deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    tokens = [entry.token for part in parts for entry in part.logprobs or []]  # type: ignore[union-attr]
    assert [entry.token for entry in deltas] == tokens
    last: Any = events[-1]
    items = [item for item in last.response.output if item.type == "message"]
    assert [entry.token for item in items for part in item.content for entry in part.logprobs] == tokens


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
    asked = ask(served, text, tools=TOOLS, max_output_tokens=num_tokens)
    texts: dict[int, str] = {}
    with openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**asked)
        events = list(client.responses.create(**asked, stream=True))
        with client.responses.stream(**asked) as stream:
            stream.until_done()  # their state machine finds no event out of place
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta  # type: ignore[union-attr]
    last: Any = events[-1]
    assert last.type == f"response.{whole.status}"
    assert without_times(last.response) == without_times(whole)
    for index, item in enumerate(whole.output):
        said = item.arguments if item.type == "function_call" else item.content[0].text  # type: ignore[union-attr,index]
        assert texts.get(index, "") == said


def test_the_store_is_bounded_in_bytes_and_in_time() -> None:
    now = 0.0
    store = ResponseStore(1000, 10.0, lambda: now)
    for index in range(10):
        store.put({"id": str(index), "text": "x" * 300}, [])
    assert store.num_bytes <= 1000
    assert store.response("9") is not None
    assert store.response("0") is None
    now = 11.0
    assert store.response("9") is None
    assert store.num_bytes == 0
