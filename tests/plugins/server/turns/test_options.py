"""What the config decides for requests that do not say: options of routes, and templates of requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from dovetail.plugins.routes.chat import request as chat_request
from dovetail.plugins.routes.chat.request import ChatRequest
from dovetail.plugins.routes.chat.route import ChatOptions
from dovetail.plugins.routes.completions.route import CompletionsOptions
from dovetail.plugins.routes.responses import request as responses_request
from dovetail.plugins.routes.responses.request import ResponsesRequest
from dovetail.plugins.server.live import live_server
from tests.plugins.server.turns.conftest import ROUTES

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
ECHOES = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def strict(hermes: Any) -> Iterator[httpx.Client]:
    """A server over the same engine that is configured otherwise."""
    chat = ChatOptions(return_tokens_as_token_ids=True, exclude_tools_when_tool_choice_none=True)
    routes = {
        **ROUTES,
        "chat": (ROUTES["chat"][0], chat),
        "completions": (ROUTES["completions"][0], CompletionsOptions(return_tokens_as_token_ids=True)),
    }
    with (
        live_server(hermes.engine, routes, model_names=("tiny",), request_chat_templates=False) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def bodies_with_a_template() -> dict[str, dict[str, Any]]:
    conversation = {"messages": HELLO, "max_tokens": 2, "chat_template": ECHOES}
    return {
        "/v1/chat/completions": conversation,
        "/v1/chat/completions/render": conversation,
        "/v1/messages": {**conversation, "model": "tiny"},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 2, "chat_template": ECHOES},
        "/tokenize": {"messages": HELLO, "chat_template": ECHOES},
    }


@pytest.mark.parametrize("path", bodies_with_a_template())
def test_a_request_brings_a_template_unless_the_server_takes_none(hermes: Any, strict: httpx.Client, path: str) -> None:
    body = bodies_with_a_template()[path]
    hermes.post(path, body)
    refused = strict.post(path, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template"
    assert "server.request_chat_templates" in refused.json()["error"]["message"]


def test_tokens_are_shown_as_ids_where_the_config_says_so(hermes: Any, strict: httpx.Client) -> None:
    body = {"messages": HELLO, **hermes.says("ab"), "logprobs": True, "return_token_ids": True, "max_tokens": 2}
    (choice,) = strict.post("/v1/chat/completions", json=body).json()["choices"]
    shown = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert shown == [f"token_id:{token}" for token in choice["token_ids"]]
    asked = strict.post("/v1/chat/completions", json={**body, "return_tokens_as_token_ids": False}).json()
    assert asked["choices"][0]["logprobs"]["content"][0]["token"] == "a"


def test_processed_log_probabilities_of_chats_have_the_mass(hermes: Any) -> None:
    body = {"messages": HELLO, **hermes.says("ab"), "logprobs": True, "logprobs_mode": "processed_logprobs"}
    (choice,) = hermes.post("/v1/chat/completions", {**body, "max_tokens": 2})["choices"]
    # The script leaves one token: all of the mass, whose log probability is 0.
    assert [(entry["logprob"], entry["surviving_mass"]) for entry in choice["logprobs"]["content"]] == [(0.0, 1.0)] * 2


def test_completions_show_tokens_as_ids(hermes: Any, strict: httpx.Client) -> None:
    body = {"prompt": "Hello", **hermes.says("ab"), "logprobs": 2, "return_token_ids": True, "max_tokens": 2}
    (choice,) = strict.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    plain = hermes.post("/v1/completions", {**body, "return_tokens_as_token_ids": None})["choices"][0]["logprobs"]
    assert plain["tokens"] == ["a", "b"]
    assert plain["text_offset"] == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize("limit", [None, 5])
def test_without_a_limit_that_of_the_generation_config_holds(hermes: Any, limit: int | None) -> None:
    facts = replace(hermes.engine.facts, default_sampling={} if limit is None else {"max_tokens": limit})
    chat = ChatRequest(messages=HELLO)
    response = ResponsesRequest(input="Hello")
    assert chat_request.what_is_asked(chat, "tiny", facts).params.max_tokens == limit
    assert responses_request.what_is_asked(response, "tiny", facts, []).params.max_tokens == limit
    chat.max_completion_tokens = 7
    assert chat_request.what_is_asked(chat, "tiny", facts).params.max_tokens == 7


def test_tools_are_left_out_under_tool_choice_none(hermes: Any, strict: httpx.Client) -> None:
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "none"}
    assert "get_weather" in hermes.post("/v1/chat/completions/render", body)["prompt"]
    assert "get_weather" not in strict.post("/v1/chat/completions/render", json=body).json()["prompt"]
