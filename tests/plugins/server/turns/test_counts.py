"""Bodies that are short enough and have too many things in them: they are refused before any of them is read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from dovetail.plugins.server.turns.messages import MAX_MESSAGES, MAX_PARTS
from dovetail.plugins.server.turns.tools import MAX_TOOLS
from tests.plugins.server.turns.conftest import Served

CHAT, RESPONSES, MESSAGES, TOKENIZE = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"
SAID = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "a"}
TEXT = {"type": "text", "text": "a"}


def functions(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": f"f{index}"}} for index in range(count)]


def calls(count: int) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "arguments": "{}"}}] * count


MANY: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "items": (RESPONSES, {"input": [CALL] * (MAX_MESSAGES + 1)}, "input", MAX_MESSAGES),
    "messages": (CHAT, {"messages": [SAID] * (MAX_MESSAGES + 1)}, "messages", MAX_MESSAGES),
    "messages of Anthropic's": (MESSAGES, {"messages": [SAID] * (MAX_MESSAGES + 1)}, "messages", MAX_MESSAGES),
    "messages to tokenize": (TOKENIZE, {"messages": [SAID] * (MAX_MESSAGES + 1)}, "messages", MAX_MESSAGES),
    "tools": (CHAT, {"messages": [SAID], "tools": functions(MAX_TOOLS + 1)}, "tools", MAX_TOOLS),
    "tools of responses": (
        RESPONSES,
        {"input": "Hi", "tools": [{"type": "function", "name": f"f{index}"} for index in range(MAX_TOOLS + 1)]},
        "tools",
        MAX_TOOLS,
    ),
    "tools of Anthropic's": (
        MESSAGES,
        {"messages": [SAID], "tools": [{"name": "f", "input_schema": {}}] * (MAX_TOOLS + 1)},
        "tools",
        MAX_TOOLS,
    ),
    "tools to tokenize": (TOKENIZE, {"messages": [SAID], "tools": functions(MAX_TOOLS + 1)}, "tools", MAX_TOOLS),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [TEXT] * (MAX_PARTS + 1)}]}, "messages", MAX_PARTS),
    "parts of two messages": (
        CHAT,
        {"messages": [{"role": "user", "content": [TEXT] * (MAX_PARTS // 2 + 1)}] * 2},
        "messages",
        MAX_PARTS,
    ),
    "calls": (CHAT, {"messages": [{"role": "assistant", "tool_calls": calls(MAX_PARTS + 1)}]}, "messages", MAX_PARTS),
    "parts of an item": (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}] * (MAX_PARTS + 1)}]},
        "input",
        MAX_PARTS,
    ),
    "parts of results": (
        MESSAGES,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [TEXT] * (MAX_PARTS + 1)}],
                }
            ]
        },
        "messages",
        MAX_PARTS,
    ),
}


@pytest.mark.parametrize("label", MANY)
def test_too_many_are_refused_with_the_limit(hermes: Served, label: str) -> None:
    path, body, param, limit = MANY[label]
    body = {**body, "max_tokens": 4} if path == MESSAGES else body
    error = hermes.post(path, body, 400)["error"]
    error = error.get("error", error)
    assert str(limit) in error["message"]
    assert error["message"].startswith(param)
    if "param" in error:
        assert error["param"] == param


def test_a_conversation_of_several_responses_has_the_limit_of_one(hermes: Served) -> None:
    items = [SAID] * MAX_MESSAGES
    answer = hermes.post(RESPONSES, {"input": "Hi", "max_output_tokens": 1})
    error = hermes.post(RESPONSES, {"previous_response_id": answer["id"], "input": items}, 400)["error"]
    assert error["param"] == "input"
    assert str(MAX_MESSAGES) in error["message"]


def test_texts_of_tokens_are_not_made_on_the_event_loop(hermes: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt has many, and all streams go by the loop."""
    made = hermes.engine.token_texts

    def off_the_loop(token_ids: Iterable[int]) -> list[str]:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return made(token_ids)

    monkeypatch.setattr(hermes.engine, "token_texts", off_the_loop)
    answer = hermes.post(TOKENIZE, {"prompt": "Once upon a time", "return_token_strs": True})
    assert "".join(answer["token_strs"]) == "Once upon a time"
