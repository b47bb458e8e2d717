"""Halves of surrogate pairs, which JSON can spell and no response can be encoded with: from clients and from models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.plugins.server.turns.conftest import Served

HALF = "\\ud83e"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": ASK,
        "max_tokens": 300,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    },
    "/v1/messages": {"messages": ASK, "max_tokens": 300, "tools": [{"name": "f", "input_schema": SCHEMA}]},
    "/v1/responses": {
        "input": "hi",
        "max_output_tokens": 300,
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    },
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["f", HALF])
def test_half_a_character_of_a_model_ends_no_response(hermes: Served, path: str, stream: bool, name: str) -> None:
    said = f'<tool_call>\n{{"name": "{name}", "arguments": {{"x": "a{HALF}b"}}}}\n</tool_call>'
    response = hermes.client.post(path, json={**BODIES[path], **hermes.says(said), "stream": stream})
    assert response.status_code == 200, response.text
    assert "event: error" not in response.text
    assert "ufffd" in response.text or "\ufffd" in response.text


def test_half_a_character_in_arguments_is_refused(hermes: Served) -> None:
    arguments = json.dumps({"x": "\ud83e"})
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*ASK, {"role": "assistant", "tool_calls": [call]}]
    error = hermes.post("/v1/chat/completions", {"messages": messages}, 400)["error"]
    assert error["param"] == "messages.1.tool_calls.0.function.arguments"


@pytest.mark.parametrize("template", ["{{ '\\ud83e' }}", "{{ raise_exception('\\ud83e') }}"])
def test_half_a_character_of_a_template_is_refused(hermes: Served, template: str) -> None:
    assert hermes.post("/v1/chat/completions", {"messages": ASK, "chat_template": template}, 400)["error"]["message"]
