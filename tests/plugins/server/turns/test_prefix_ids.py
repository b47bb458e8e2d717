"""Conversations whose prompts keep the ids that the model saw and produced."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dovetail.testing.chat_models import FAMILIES, Family

from .conftest import Served

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "Tell me a story"}]
ANSWER = "the cat and the dog sat down"


def in_single_letters(served: Served, text: str) -> dict[str, Any]:
    """Fields of a request that has the model say this in other tokens than the tokenizer makes of it."""
    tokens = [
        token for letter in text for token in asyncio.run(served.engine.tokenize(letter, add_special_tokens=False))
    ]
    return {"processors": {"script": tokens}, "temperature": 0}


@pytest.fixture
def words(serve_family: Callable[[str, Family], Served]) -> Served:
    """A model with tokens of several letters."""
    hermes = FAMILIES["hermes"]
    return serve_family("words", replace(hermes, plain=(*hermes.plain, "cat", "dog")))


@pytest.fixture
def first(words: Served) -> dict[str, Any]:
    """A first turn, whose prefix is empty."""
    says = in_single_letters(words, ANSWER)
    return words.post(CHAT, {"messages": QUESTION, "required_prefix_token_ids": [], "logprobs": True, **says})


def next_body(first: dict[str, Any], said: str = ANSWER) -> dict[str, Any]:
    messages = [*QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    prefix = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    return {"messages": messages, "required_prefix_token_ids": prefix}


def test_the_next_prompt_begins_with_the_ids_of_the_turn_before(words: Served, first: dict[str, Any]) -> None:
    assert first["choices"][0]["message"]["content"] == ANSWER
    assert len(first["choices"][0]["logprobs"]["content"]) == len(first["choices"][0]["token_ids"])
    body = next_body(first)
    prefix = body["required_prefix_token_ids"]
    second = words.post(CHAT, {**body, **words.says("yes")})
    rendered = words.post("/tokenize", {"messages": body["messages"]})["tokens"]
    verdict = second["prefix_verdict"]
    assert rendered[: len(prefix)] != prefix
    assert second["prompt_token_ids"] == prefix + rendered[verdict["resumed_at"] :]
    assert (verdict["preserved"], verdict["outcome"]) == (True, "retokenized")
    assert rendered[: verdict["index"]] == prefix[: verdict["index"]]


def test_tokenize_and_render_give_the_same_ids(words: Served, first: dict[str, Any]) -> None:
    body = next_body(first)
    prompt = words.post(CHAT, {**body, **words.says("yes")})
    tokenized, rendered = words.post("/tokenize", body), words.post(f"{CHAT}/render", body)
    assert tokenized["tokens"] == rendered["prompt_token_ids"] == prompt["prompt_token_ids"]
    assert tokenized["prefix_verdict"] == rendered["prefix_verdict"] == prompt["prefix_verdict"]
    assert rendered["prompt"].count(ANSWER) == 1


def test_a_turn_that_is_rewritten_is_said_to_be(words: Served, first: dict[str, Any]) -> None:
    body = next_body(first, said="the cat sat down")
    second = words.post("/tokenize", body)
    assert second["tokens"] == words.post("/tokenize", {"messages": body["messages"]})["tokens"]
    verdict = second["prefix_verdict"]
    assert (verdict["preserved"], verdict["outcome"], verdict["resumed_at"]) == (False, "rewritten", 0)
    assert second["tokens"][verdict["index"]] != body["required_prefix_token_ids"][verdict["index"]]


def test_a_turn_that_is_rewritten_is_kept_where_the_request_says_so(words: Served, first: dict[str, Any]) -> None:
    body = {**next_body(first, said="the cat sat down"), "keep_rewritten": True}
    prefix = body["required_prefix_token_ids"]
    second = words.post(CHAT, {**body, **words.says("yes")})
    rendered = words.post("/tokenize", {"messages": body["messages"]})["tokens"]
    verdict = second["prefix_verdict"]
    assert (verdict["preserved"], verdict["outcome"]) == (True, "rewritten")
    assert second["prompt_token_ids"] == prefix + rendered[verdict["resumed_at"] :]
    assert words.post("/tokenize", body)["tokens"] == second["prompt_token_ids"]
    alone = words.post(CHAT, {"messages": QUESTION, "keep_rewritten": True}, status=400)
    assert alone["error"]["param"] == "keep_rewritten"


def test_the_first_frame_of_a_stream_has_the_verdict(words: Served, first: dict[str, Any]) -> None:
    body = {**next_body(first), **words.says("yes"), "stream": True}
    lines = words.client.post(CHAT, json=body).text.splitlines()
    frames = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert frames[0]["prefix_verdict"]["preserved"]
    assert frames[0]["prompt_token_ids"][: len(body["required_prefix_token_ids"])] == body["required_prefix_token_ids"]
    assert not any("prefix_verdict" in frame for frame in frames[1:])


def test_what_are_no_token_ids_is_refused(words: Served) -> None:
    answer = words.post(CHAT, {"messages": QUESTION, "required_prefix_token_ids": [10**6]}, status=400)
    assert answer["error"]["param"] == "required_prefix_token_ids"
