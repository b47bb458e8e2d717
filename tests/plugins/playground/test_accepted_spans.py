"""/v1/completions with `return_accepted_spans`, compared with the engine asked directly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dovetail import RequestOutput

PROMPT = "Once upon a time, there was a little girl named Lily. Once upon a time"
ASKED = {"prompt": PROMPT, "temperature": 0, "max_tokens": 70}


def answer(client: httpx.Client, is_stream: bool, **body: Any) -> dict[str, Any]:
    """The only choice; of a stream, all its parts as one."""
    asked = {**ASKED, "return_accepted_spans": True, "stream": is_stream, **body}
    return choice_of(client.post("/v1/completions", json=asked), is_stream)


def choice_of(response: httpx.Response, is_stream: bool) -> dict[str, Any]:
    """Likewise."""
    assert response.status_code == 200, response.text
    if not is_stream:
        (choice,) = response.json()["choices"]
        return choice
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert events[-1] == "[DONE]"
    assert all("speculation" not in choice for choice in choices[:-1])
    tokens = [token for choice in choices for token in choice["tokens"]]
    return {**choices[-1], "text": "".join(choice.get("text", "") for choice in choices), "tokens": tokens}


@pytest.mark.parametrize("is_stream", [False, True])
def test_tokens_are_marked_as_the_engine_says(
    is_stream: bool, client: httpx.Client, complete: Callable[..., RequestOutput]
) -> None:
    output = complete(PROMPT, max_tokens=70)
    (completion,) = output.outputs
    accepted = {start + i for start, count in completion.accepted_spans for i in range(count)}
    assert len(accepted) > 10
    choice = answer(client, is_stream)
    assert [token["accepted"] for token in choice["tokens"]] == [i in accepted for i in range(70)]
    assert "".join(token["text"] for token in choice["tokens"]) == choice["text"] == completion.text
    metrics = output.metrics
    assert choice["speculation"] == {
        "drafter": "lookup",
        "num_rounds": metrics.num_draft_rounds,
        "num_drafted": metrics.num_drafted,
        "num_accepted": metrics.num_accepted,
        "acceptance_rate": metrics.acceptance_rate,
        "mean_accepted_length": metrics.mean_accepted_length,
        "error": None,
    }


@pytest.mark.parametrize("is_stream", [False, True])
def test_without_a_drafter_no_token_is_marked(is_stream: bool, client: httpx.Client) -> None:
    choice = answer(client, is_stream, speculation="off")
    assert [token["accepted"] for token in choice["tokens"]] == [False] * 70
    assert choice["speculation"] is None


def test_who_does_not_ask_gets_nothing_more(client: httpx.Client) -> None:
    (choice,) = client.post("/v1/completions", json=ASKED).json()["choices"]
    assert {"tokens", "speculation"}.isdisjoint(choice)


@pytest.mark.parametrize("is_stream", [False, True])
def test_chat_marks_tokens_too(is_stream: bool, client: httpx.Client, complete: Callable[..., RequestOutput]) -> None:
    """The chat template of the model writes the message and a space."""
    output = complete(f"{PROMPT} ", max_tokens=50)
    spans = output.outputs[0].accepted_spans
    accepted = {start + i for start, count in spans for i in range(count)}
    assert accepted
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 50, "stream": is_stream}
    choice = choice_of(client.post("/v1/chat/completions", json={**body, "return_accepted_spans": True}), is_stream)
    assert [token["accepted"] for token in choice["tokens"]] == [i in accepted for i in range(50)]
    assert choice["speculation"]["num_accepted"] == output.metrics.num_accepted
    (plain,) = client.post("/v1/chat/completions", json={**body, "stream": False}).json()["choices"]
    assert {"tokens", "speculation"}.isdisjoint(plain)
