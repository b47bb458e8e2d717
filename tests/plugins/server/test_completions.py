"""/v1/completions: what it answers, compared with the engine asked directly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from dovetail import AsyncLLMEngine, SamplingParams
from dovetail.contracts.outputs import RequestOutput

pytestmark = pytest.mark.usefixtures("nothing_is_held")

PROMPT = "Once upon a time"


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The events, without the last, which is [DONE]."""
    response = client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def texts(events: list[dict[str, Any]]) -> dict[int, str]:
    """The text of each choice."""
    found: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def generate(engine: AsyncLLMEngine, prompt: Any, **params: Any) -> RequestOutput:
    async def run() -> RequestOutput:
        stream = await engine.submit(prompt, SamplingParams(temperature=0, output_kind="final_only", **params))
        return [output async for output in stream][-1]

    return asyncio.run(run())


def test_the_text_is_the_engines(client: httpx.Client, engine: AsyncLLMEngine) -> None:
    answer = ask(client, max_tokens=12)
    output = generate(engine, PROMPT, max_tokens=12)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (output.outputs[0].text, "length")
    assert answer["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
    assert answer["usage"]["completion_tokens"] == 12
    assert (answer["model"], answer["object"]) == ("story", "text_completion")


def test_without_max_tokens_there_are_sixteen(client: httpx.Client) -> None:
    assert ask(client)["usage"]["completion_tokens"] == 16


def test_max_tokens_null_is_the_models_length(client: httpx.Client) -> None:
    assert ask(client, max_tokens=None)["usage"]["total_tokens"] == 256


def test_a_stream_adds_up_to_the_whole_text(client: httpx.Client) -> None:
    events = stream(client, max_tokens=30)
    assert texts(events) == {0: ask(client, max_tokens=30)["choices"][0]["text"]}
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "length"
    assert len({event["id"] for event in events}) == 1


def test_usage_comes_last_where_it_is_asked_for(client: httpx.Client) -> None:
    events = stream(client, max_tokens=5, stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 5


def test_continuous_usage_grows_to_the_last(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [event["usage"]["completion_tokens"] for event in stream(client, max_tokens=5, stream_options=options)]
    assert counts == sorted(counts)
    assert counts[-1] == 5


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("prompts", [[PROMPT, "The cat"], [[346, 336], [346], [336]]])
def test_several_prompts_have_choices_in_their_order(client: httpx.Client, prompts: Any, is_stream: bool) -> None:
    alone = {index: ask(client, prompt=prompt)["choices"][0]["text"] for index, prompt in enumerate(prompts)}
    if is_stream:
        assert texts(stream(client, prompt=prompts)) == alone
    else:
        assert {choice["index"]: choice["text"] for choice in ask(client, prompt=prompts)["choices"]} == alone


@pytest.mark.parametrize("is_stream", [False, True])
def test_n_completions_of_two_prompts_are_numbered_through(client: httpx.Client, is_stream: bool) -> None:
    body = {"prompt": [PROMPT, "The cat"], "n": 2, "temperature": 1, "seed": 3, "max_tokens": 4}
    if is_stream:
        assert sorted(texts(stream(client, **body))) == [0, 1, 2, 3]
    else:
        assert [choice["index"] for choice in ask(client, **body)["choices"]] == [0, 1, 2, 3]


def test_best_of_returns_n_and_counts_all(client: httpx.Client) -> None:
    answer = ask(client, n=1, best_of=3, temperature=1, seed=3, max_tokens=4)
    assert len(answer["choices"]) == 1
    assert answer["usage"]["completion_tokens"] == 12


def test_a_seed_repeats(client: httpx.Client) -> None:
    one, two = (ask(client, temperature=2, seed=11)["choices"][0]["text"] for _ in range(2))
    other = ask(client, temperature=2, seed=12)["choices"][0]["text"]
    assert one == two != other


@pytest.mark.parametrize("is_stream", [False, True])
def test_echo_shows_the_prompt_first(client: httpx.Client, is_stream: bool) -> None:
    for prompt in (PROMPT, [346, 336]):
        plain = ask(client, prompt=prompt)["choices"][0]["text"]
        echoed = {"prompt": prompt, "echo": True}
        text = texts(stream(client, **echoed))[0] if is_stream else ask(client, **echoed)["choices"][0]["text"]
        shown = prompt if isinstance(prompt, str) else "Once upon"
        assert text == shown + plain


def test_lm_evals_scores_of_continuations(client: httpx.Client, story_model: Path) -> None:
    """The body that lm-eval 0.4.13 sends and how it reads the answer, beside transformers."""
    model = AutoModelForCausalLM.from_pretrained(story_model, dtype=torch.float32)
    contexts, prompts = (1, 3), [[346, 336, 300], [300, 346, 336, 280, 346]]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = sorted(ask(client, model="story", **body)["choices"], key=lambda choice: choice["index"])
    for choice, prompt, start in zip(choices, prompts, contexts, strict=True):
        scores = choice["logprobs"]["token_logprobs"][start:-1]
        best = choice["logprobs"]["top_logprobs"][start:-1]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
        behind = range(start, len(prompt))
        assert scores == pytest.approx([float(logprobs[i - 1, prompt[i]]) for i in behind], abs=1e-4)
        is_greedy = [score == max(top.values()) for score, top in zip(scores, best, strict=True)]
        assert is_greedy == [int(logprobs[i - 1].argmax()) == prompt[i] for i in behind]


def test_scores_of_a_prompt_alone(client: httpx.Client, engine: AsyncLLMEngine) -> None:
    """max_tokens 0, echo and logprobs."""
    answer = ask(client, max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    output = generate(engine, PROMPT, max_tokens=1, prompt_logprobs=1)
    assert output.prompt_logprobs is not None
    rest = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    expected = [None, *(position[token].logprob for token, position in rest if position)]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, "Naïve 🐈 said ", "\u00e9\u00e9\u00e9"])
def test_text_offsets_point_into_the_text(client: httpx.Client, prompt: str, echo: bool, is_stream: bool) -> None:
    body = {"prompt": prompt, "echo": echo, "logprobs": 0, "max_tokens": 9}
    if is_stream:
        events = stream(client, **body)
        text = texts(events)[0]
        lists = [event["choices"][0]["logprobs"] for event in events]
        tokens = [token for one in lists for token in one["tokens"]]
        offsets = [offset for one in lists for offset in one["text_offset"]]
    else:
        choice = ask(client, **body)["choices"][0]
        text, tokens, offsets = choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if "\ufffd" not in token:
            assert text[offset : offset + len(token)] == token


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(client: httpx.Client, is_stream: bool) -> None:
    body = {"stop": [" girl", "never"], "max_tokens": 40}
    if is_stream:
        events = stream(client, **body)
        last, text = events[-1]["choices"][0], texts(events)[0]
    else:
        last = ask(client, **body)["choices"][0]
        text = last["text"]
    assert " girl" not in text
    assert text.endswith("little")
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", " girl")


def test_token_ids_are_returned_where_asked_for(client: httpx.Client, engine: AsyncLLMEngine) -> None:
    output = generate(engine, PROMPT, max_tokens=6)
    choice = ask(client, max_tokens=6, return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == output.outputs[0].token_ids
    assert choice["prompt_token_ids"] == output.prompt_token_ids
    events = stream(client, max_tokens=6, return_token_ids=True)
    assert [i for event in events for i in event["choices"][0]["token_ids"]] == output.outputs[0].token_ids
    assert events[0]["choices"][0]["prompt_token_ids"] == output.prompt_token_ids
    assert "prompt_token_ids" not in events[-1]["choices"][0]


def test_prompt_logprobs_have_vllms_shape(client: httpx.Client) -> None:
    first, second, *_ = ask(client, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert first is None
    ((token, entry),) = second.items()
    assert int(token) >= 0
    assert set(entry) == {"logprob", "rank", "decoded_token"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"logit_bias": {"346": 100}}, "OnceOnceOnceOnce"),
        ({"allowed_token_ids": [346]}, "OnceOnceOnceOnce"),
        ({"top_k": 1, "temperature": 5.0}, ", there was a"),
        ({"min_p": 1.0, "temperature": 5.0}, ", there was a"),
        ({"bad_words": [" there"]}, None),
        ({"stop": " was", "include_stop_str_in_output": True}, ", there was"),
        ({"truncate_prompt_tokens": 3, "prompt": "The end. Once upon a time"}, ", there was a"),
        ({"truncate_prompt_tokens": -1}, ", there was a"),
        ({"speculation": "off"}, ", there was a"),
        ({"user": "u", "metadata": {"a": [1]}, "store": True, "service_tier": "auto"}, ", there was a"),
        ({"n": None, "stop": None, "logprobs": None, "suffix": None, "best_of": None}, ", there was a"),
        ({"ignore_eos": True, "min_tokens": 4, "skip_special_tokens": False}, ", there was a"),
        ({"stop_token_ids": [346], "spaces_between_special_tokens": True, "use_beam_search": False}, ", there was a"),
        ({"cache_salt": "mine", "add_special_tokens": False, "priority": 0}, ", there was a"),
    ],
)
def test_vllms_fields_reach_the_engine(client: httpx.Client, fields: dict[str, Any], expected: str | None) -> None:
    text = ask(client, **{"max_tokens": 4, **fields})["choices"][0]["text"]
    assert text == expected if expected is not None else " there" not in text


def test_a_salt_keeps_prefixes_apart(client: httpx.Client) -> None:
    prompt = "She was kind, and the cat was kind too. Then it was time to go home."

    def cached(salt: str) -> int:
        counts = ask(client, prompt=prompt, cache_salt=salt)["usage"]["prompt_tokens_details"]
        return int(counts["cached_tokens"])

    assert cached("one") == 0
    assert cached("one") > 0
    assert cached("two") == 0


def test_the_clients_own_request_id_is_shown(client: httpx.Client) -> None:
    assert ask(client, request_id="mine")["id"] == "cmpl-mine"
    response = client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "header"})
    assert response.json()["id"] == "cmpl-header"


def test_every_response_shows_its_request_id(client: httpx.Client) -> None:
    body = {"prompt": "Once", "max_tokens": 2}
    of_header = client.post("/v1/completions", json=body, headers={"x-request-id": "a b"})
    assert (of_header.headers["x-request-id"], of_header.json()["id"]) == ("a b", "cmpl-a b")
    of_body = client.post("/v1/completions", json={**body, "request_id": "own"}, headers={"x-request-id": "a"})
    assert (of_body.headers["x-request-id"], of_body.json()["id"]) == ("own", "cmpl-own")
    random = [client.post("/v1/completions", json={**body, "stream": stream}) for stream in (False, True)]
    assert random[0].json()["id"] == f"cmpl-{random[0].headers['x-request-id']}"
    assert f"cmpl-{random[1].headers['x-request-id']}" in random[1].text
    for path, status in (("/health", 200), ("/nowhere", 404)):
        response = client.get(path, headers={"x-request-id": "probe"})
        assert (response.status_code, response.headers["x-request-id"]) == (status, "probe")


@pytest.mark.parametrize("own", ["a\nb", "a\r\nset-cookie: a=b", "a\tb", "\u00e9", "\x7f", "x" * 513])
def test_a_request_id_that_no_header_can_show_is_refused(
    client: httpx.Client, check_error: Callable[..., dict[str, Any]], own: str
) -> None:
    response = client.post("/v1/completions", json={"prompt": "Once", "request_id": own})
    check_error(response, 400, "request_id")
    assert response.headers["x-request-id"] != own
    if not set(own) & set("\r\n\x7f"):  # those are no HTTP
        response = client.get("/health", headers={"x-request-id": own.encode("latin-1")})
        assert "x-request-id" in check_error(response, 400)["message"]
        assert response.headers["x-request-id"] != own


def test_every_name_of_the_model_is_answered_with_itself(client: httpx.Client) -> None:
    assert ask(client, model="fable")["model"] == "fable"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["story", "fable"]
    assert client.get("/v1/models/fable").json()["id"] == "fable"
