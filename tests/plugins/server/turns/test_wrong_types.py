"""A value of a wrong type, wherever it is in a body, is answered or refused: a 5xx is a bug."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "f", "description": "F.", "parameters": SCHEMA, "strict": False}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
SAMPLING: dict[str, Any] = {
    "temperature": 0,
    "stop": ["never"],
    "seed": 1,
    "top_k": 4,
    "logit_bias": {"3": 1},
    "stream_options": {"include_usage": True},
    "stream": True,
    "request_id": "mine",
    "cache_salt": "salt",
    "user": "me",
    "bad_words": ["never"],
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        **SAMPLING,
        "prompt": "Once",
        "logprobs": 1,
        "echo": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
    "/v1/chat/completions": {
        **SAMPLING,
        "max_tokens": 2,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello"}], "name": "me"},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "Sunny."},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        "chat_template": "{% for m in messages %}{{ m.content }}{{ tools | length }}{{ more }}{% endfor %}",
        "chat_template_kwargs": {"more": 1},
    },
    "/v1/responses": {
        **{name: value for name, value in SAMPLING.items() if name != "stream_options"},
        "max_output_tokens": 2,
        "instructions": "Be kind.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "abcdefghi", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "abcdefghi", "output": "done"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        "reasoning": {"summary": "auto"},
        "metadata": {"a": "b"},
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/v1/messages": {
        **{name: value for name, value in SAMPLING.items() if name not in ("stop", "stream_options")},
        "max_tokens": 2,
        "system": [{"type": "text", "text": "Be kind."}],
        "messages": [
            {"role": "user", "content": "Hello"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "Yes."},
                    {"type": "tool_use", "id": "abcdefghi", "name": "f", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "abcdefghi", "content": [{"type": "text", "text": "Sunny."}]}
                ],
            },
        ],
        "tools": [{"name": "f", "description": "F.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "metadata": {"user_id": "me"},
        "stop_sequences": ["never"],
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/tokenize": {
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [{"type": "function", "function": FUNCTION}],
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": True,
        "return_token_strs": True,
    },
}
Path = tuple[str | int, ...]
SCALARS: st.SearchStrategy[Any] = st.sampled_from([None, True, 0, 5, -1, 1.5, 2**70, "", "text", "é"])
NAMES = st.sampled_from(
    ["type", "tools", "messages", "self", "text", "content", "name", "schema", "format", "function"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2), max_leaves=4
)


def paths(node: Any, path: Path = ()) -> Iterator[Path]:
    """Of every value in a body, but for the limits that keep it short."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        if name not in ("max_tokens", "max_output_tokens"):
            yield (*path, name)
            yield from paths(value, (*path, name))


def replaced(body: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    node: Any = changed
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    return changed


@pytest.mark.parametrize("path", BODIES)
def test_the_bodies_are_right(hermes: Any, path: str) -> None:
    response = hermes.client.post(path, json=BODIES[path])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", BODIES)
@settings(
    max_examples=120, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_wrong_type_is_no_fault_of_the_server(hermes: Any, path: str, data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(list(paths(BODIES[path]))))
    response = hermes.client.post(path, json=replaced(BODIES[path], place, data.draw(VALUES)))
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    assert b'"type":"server_error"' not in response.content  # the last event of a stream
    assert b"internal error" not in response.content


@pytest.mark.parametrize(
    ("path", "place", "value", "param"),
    [
        ("/v1/messages", ("messages", 2, "content", 0, "content"), 5, "messages.2.content.0.content"),
        ("/v1/messages", ("tool_choice", "type"), [], "tool_choice.type"),
        ("/v1/messages", ("output_config", "format"), 5, "output_config.format"),
        ("/v1/messages", ("thinking",), {"type": 5}, "thinking.type"),
        ("/v1/messages", ("thinking",), {}, "thinking.type"),
        ("/v1/responses", ("text", "format"), 5, "text.format"),
        ("/v1/responses", ("input", 1, "id"), 2**70, "input"),
        ("/v1/responses", ("text", "format"), {"type": "json_schema", "schema": 5}, "text.format.schema"),
        *[
            (path, ("chat_template_kwargs",), {name: 1}, f"chat_template_kwargs.{name}")
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize")
            for name in ("tools", "messages", "self", "text", "tokenize", "chat_template", "add_generation_prompt")
        ],
    ],
)
def test_what_is_wrong_is_named(hermes: Any, path: str, place: Path, value: Any, param: str) -> None:
    assert hermes.post(path, replaced(BODIES[path], place, value), 400)["error"]["param"] == param


SCHEMA_PARAM = "response_format.json_schema.schema"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "response_format.type"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": 5}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, SCHEMA_PARAM),
        ({"type": "json_schema", "json_schema": {"schema": True}}, SCHEMA_PARAM),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, SCHEMA_PARAM),
        ({"type": "json_schema", "json_schema": {"shema": {}}}, "response_format.json_schema.shema"),
        ({"type": "json_object", "schema": {}}, "response_format.schema"),
        (5, "response_format"),
    ],
)
def test_a_response_format_is_read_in_one_way(hermes: Any, path: str, asked: Any, param: str) -> None:
    body = {name: BODIES[path][name] for name in ("messages", "prompt") if name in BODIES[path]}
    assert hermes.post(path, {**body, "response_format": asked}, 400)["error"]["param"] == param
