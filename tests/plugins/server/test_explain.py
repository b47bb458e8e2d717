"""What the route `explain` says of a request: before it runs, while it runs, and after its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from dovetail import AsyncLLMEngine
from dovetail.contracts.plugin import PluginOptions
from dovetail.plugins.routes.chat.route import ChatRoute
from dovetail.plugins.routes.completions.route import CompletionsRoute
from dovetail.plugins.routes.explain.route import ExplainRoute
from dovetail.plugins.routes.messages.route import MessagesRoute
from dovetail.plugins.routes.responses.route import ResponsesRoute
from dovetail.plugins.server.live import LiveServer, live_server
from dovetail.testing.chat_models import FAMILIES, save_chat_model
from dovetail.testing.watched_engine import Script, WatchedEngine
from tests.waiting import wait_until

CheckError = Callable[..., dict[str, Any]]

ROUTES = {
    "completions": CompletionsRoute,
    "chat": ChatRoute,
    "messages": MessagesRoute,
    "responses": ResponsesRoute,
    "explain": ExplainRoute,
}
ENDPOINTS = {
    "completions": {"prompt": "Hello there", "max_tokens": 4},
    "chat/completions": {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 4},
    "messages": {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 4},
    "responses": {"input": "Hello there", "max_output_tokens": 4},
}
CHAT = ENDPOINTS["chat/completions"]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["red", "blue"]}}}
KEPT = 6
USERS = {"unit": "user", "traffic": 1.0}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLMEngine]:
    directory = tmp_path_factory.mktemp("chat-model")
    save_chat_model(directory, FAMILIES["hermes"])
    generation = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 40}
    (directory / "generation_config.json").write_bytes(orjson.dumps(generation))
    config = {
        "model": {"path": str(directory), "dtype": "float32", "max_model_len": 256},
        "cache": {"block_size": 4, "num_blocks": 600},
        "scheduler": {"name": "priority"},
        "executor": {"threads": 1},
        "speculative": {
            "drafters": {"lookup": {"name": "ngram", "num_tokens": 4, "min_match": 1, "length": "fixed"}},
            "default": "lookup",
            "disable_logprobs": True,
        },
        "logits_processors": ["no_repeat_ngram"],
    }
    with AsyncLLMEngine.from_config(config) as created:
        yield created


@pytest.fixture(scope="module")
def server(engine: AsyncLLMEngine) -> Iterator[LiveServer]:
    engine._engine.keep_ended(KEPT)
    routes = {label: (kind, kind.Options()) for label, kind in ROUTES.items()}
    with live_server(engine, routes, model_names=("tiny",)) as live:
        yield live


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as created:
        yield created


def plan(client: httpx.Client, endpoint: str, **fields: Any) -> dict[str, Any]:
    """What is said of a request before it runs."""
    response = client.post(f"/v1/explain/{endpoint}", json={**ENDPOINTS[endpoint], **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def ran(client: httpx.Client, endpoint: str = "completions", **fields: Any) -> dict[str, Any]:
    """Runs a request, and returns what is said of it afterwards."""
    response = client.post(f"/v1/{endpoint}", json={**ENDPOINTS[endpoint], **fields})
    assert response.status_code == 200, response.text
    (found,) = explained(client, response.json()["id"])
    return found


def explained(client: httpx.Client, request_id: str) -> list[dict[str, Any]]:
    response = client.get(f"/v1/explain/{request_id}")
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["requests"]
    return found


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_plan_is_what_then_happens(client: httpx.Client, endpoint: str) -> None:
    planned, done = plan(client, endpoint), ran(client, endpoint)
    (prompt,) = planned["prompts"]
    assert prompt["tokens"] == done["prompt"]["tokens"]
    assert prompt["max_tokens"]["value"] == 4
    assert planned["speculation"]["drafter"] == done["speculation"]["drafter"] == "lookup"
    assert planned["speculation"]["why"] == "speculative.default of the config"
    assert planned["dialect"]["name"] == (None if endpoint == "completions" else "hermes")


def test_a_plan_runs_nothing(client: httpx.Client, engine: AsyncLLMEngine) -> None:
    plan(client, "completions", request_id="never-ran")
    assert client.get("/v1/explain/never-ran").status_code == 404


def test_each_prompt_has_its_plan(client: httpx.Client) -> None:
    found = plan(client, "completions", prompt=["a", "abc", [5, 6]])
    assert [each["tokens"] for each in found["prompts"]] == [1, 3, 2]


@pytest.mark.parametrize(
    ("endpoint", "fields", "value", "origin"),
    [
        ("completions", {"max_tokens": 7}, 7, "request"),
        ("completions", {"max_tokens": 10_000}, 256 - 11, "model_length"),
        ("completions", {"max_tokens": None}, 40, "generation_config"),
        ("completions", {"max_tokens": 0, "echo": True}, 1, "request"),
        ("chat/completions", {"max_tokens": None, "max_completion_tokens": 9}, 9, "request"),
        ("chat/completions", {"max_tokens": None}, 40, "generation_config"),
        ("responses", {}, 4, "request"),
    ],
)
def test_the_limit_of_tokens_has_its_origin(
    client: httpx.Client, endpoint: str, fields: dict[str, Any], value: int, origin: str
) -> None:
    found = plan(client, endpoint, **fields)["prompts"][0]["max_tokens"]
    assert (found["value"], found["origin"]) == (value, origin)


def test_a_generation_config_limits_what_the_request_does_not(client: httpx.Client) -> None:
    found = ran(client, "chat/completions", max_tokens=None, ignore_eos=True)
    assert (found["output"]["tokens"], found["output"]["finish_reason"]) == (40, "length")


def test_the_limit_of_an_endpoint_is_the_default(client: httpx.Client) -> None:
    response = client.post("/v1/explain/completions", json={"prompt": "Hello there"})
    limit = response.json()["prompts"][0]["max_tokens"]
    assert (limit["value"], limit["origin"]) == (16, "default")


def test_sampling_parameters_have_their_origin(client: httpx.Client) -> None:
    found = plan(client, "chat/completions", temperature=0.25, seed=5, stop_token_ids=[9])["sampling"]
    assert found["temperature"] == {"value": 0.25, "origin": "request"}
    assert found["seed"] == {"value": 5, "origin": "request"}
    assert found["top_k"] == {"value": 20, "origin": "generation_config"}
    assert found["top_p"] == {"value": 1.0, "origin": "default"}
    assert found["stop_token_ids"]["origin"] in ("request", "request and dialect")
    assert found["kept_special_tokens"]["origin"] == "dialect"


@pytest.mark.parametrize(
    ("fields", "drafter", "why"),
    [
        ({"speculation": "off"}, None, "speculation: off"),
        ({"speculation": "lookup"}, "lookup", "the request names it"),
        ({}, "lookup", "speculative.default"),
    ],
)
def test_the_drafter_has_its_reason(
    client: httpx.Client, fields: dict[str, Any], drafter: str | None, why: str
) -> None:
    for found in (plan(client, "completions", **fields), ran(client, **fields)):
        assert found["speculation"]["drafter"] == drafter
        assert why in found["speculation"]["why"]


@pytest.mark.parametrize(
    ("endpoint", "fields", "form", "source", "why"),
    [
        ("completions", {}, None, None, "nothing in the request"),
        ("completions", {"response_format": {"type": "text"}}, None, None, "nothing in the request"),
        ("completions", {"response_format": SCHEMA}, "json_schema", "response_format", "asks for a form"),
        ("completions", {"guided_regex": "[0-9]"}, "regex", "guided_regex", "asks for a form"),
        ("completions", {"structured_outputs": {"choice": ["a"]}}, "choice", "structured_outputs", "asks"),
        ("chat/completions", {"response_format": SCHEMA}, "lark", "response_format", "asks for a form"),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "required"}, "lark", "tools", "tool_choice: required"),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "none"}, None, None, "nothing in the request"),
        ("responses", {"text": {"format": {"type": "json_object"}}}, "lark", "text", "asks for a form"),
    ],
)
def test_the_grammar_has_its_source(
    client: httpx.Client, endpoint: str, fields: dict[str, Any], form: str | None, source: str | None, why: str
) -> None:
    found = plan(client, endpoint, **fields)["grammar"]
    assert (found["form"], found["source"]) == (form, source)
    assert found["backend"] == ("llguidance" if form else None)
    assert why in found["why"]


def test_the_rest_of_a_plan(client: httpx.Client) -> None:
    found = plan(client, "completions", priority=3, processors={"no_repeat_ngram": 2}, cache_salt="mine")
    assert found["priority"] == {"value": 3, "why": "the scheduler 'priority' reads it"}
    assert found["processors"] == {"asked": {"no_repeat_ngram": 2}, "configured": ["no_repeat_ngram"]}
    assert "the same cache_salt" in found["prefix_cache"]["why"]
    scored = plan(client, "completions", prompt_logprobs=1, speculation="off")
    assert scored["prefix_cache"]["is_read"] is False


@pytest.mark.parametrize(
    ("endpoint", "fields", "param", "message"),
    [
        ("completions", {"logprobs": 1}, "logprobs", "speculative.disable_logprobs"),
        ("completions", {"prompt": "x" * 300}, None, "max_model_len is 256"),
        ("completions", {"speculation": "unheard"}, None, "no drafter 'unheard'"),
        ("completions", {"no_such_field": 1}, "no_such_field", "unknown field"),
        ("chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "leave stream out"),
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id", "give all items"),
    ],
)
def test_what_the_endpoint_refuses_the_plan_refuses(
    client: httpx.Client,
    check_error: CheckError,
    endpoint: str,
    fields: dict[str, Any],
    param: str | None,
    message: str,
) -> None:
    response = client.post(f"/v1/explain/{endpoint}", json={**ENDPOINTS[endpoint], **fields})
    assert message in check_error(response, 400, param)["message"]
    refused = client.post(f"/v1/{endpoint}", json={**ENDPOINTS[endpoint], **fields})
    assert refused.status_code in (400, 404)


def test_cached_tokens_have_their_reason(client: httpx.Client) -> None:
    text = "the cat and the dog"
    first = ran(client, prompt=text, cache_salt="a")["prompt"]
    again = ran(client, prompt=text, cache_salt="a")["prompt"]
    longer = ran(client, prompt=f"{text} play in the sun", cache_salt="a")["prompt"]
    salted = ran(client, prompt=text, cache_salt="b")["prompt"]
    scored = ran(client, prompt=text, cache_salt="a", prompt_logprobs=0)["prompt"]
    short = ran(client, prompt="the")["prompt"]
    assert [each["cached_tokens"] for each in (first, again, longer, salted, scored, short)] == [0, 16, 16, 0, 0, 0]
    assert "match none that another request with the same cache_salt left" in first["why"]
    assert "all whole blocks of 4 tokens" in again["why"]
    assert "the tokens behind match none" in longer["why"]
    assert "same cache_salt" in salted["why"]
    assert "log probabilities of the prompt" in scored["why"]
    assert "fills no block of 4 tokens" in short["why"]


def test_counts_of_drafts_and_times_add_up(client: httpx.Client) -> None:
    found = ran(client, prompt="abcabcabcabc", max_tokens=60, temperature=0, ignore_eos=True)
    drafts, times = found["speculation"], found["times"]
    assert drafts["steps_with_drafts"] > 0
    assert drafts["acceptance_length"] == 1 + drafts["accepted_tokens"] / drafts["steps_with_drafts"]
    assert drafts["draft_tokens"] == sum(drafts["drafted_per_position"])
    assert found["output"] == {"tokens": 60, "completions": 1, "finish_reason": "length", "error_type": None}
    assert times["ttft_s"] == pytest.approx(times["queue_s"] + times["prefill_s"])
    assert times["total_s"] == pytest.approx(times["ttft_s"] + times["decode_s"])
    assert times["itl_s"] == pytest.approx(times["decode_s"] / 59)
    assert (found["state"], found["weight_version"], found["adapter"]["name"]) == ("finished", 0, None)


def test_a_grammar_is_compiled_once(client: httpx.Client) -> None:
    fields = {"guided_regex": "[0-9]{2}x", "max_tokens": 8}
    first, second = (ran(client, **fields)["grammar"] for _ in range(2))
    assert (first["backend"], first["form"], first["was_compiled"]) == ("llguidance", "regex", False)
    assert (second["was_compiled"], second["why"]) == (True, "an earlier request had it compiled")
    assert ran(client)["grammar"]["why"] == "the request asked for no form of its output"


def test_a_grammar_that_cannot_be_compiled_is_told(client: httpx.Client) -> None:
    body = {**ENDPOINTS["completions"], "guided_regex": "a(?=b)", "request_id": "refused"}
    assert client.post("/v1/completions", json=body).status_code == 400
    (found,) = explained(client, "refused")
    assert "cannot be compiled" in found["grammar"]["why"]
    assert (found["output"]["finish_reason"], found["prompt"]["why"]) == ("error", "no step has computed any of it")


def test_a_request_that_runs_is_explained(engine: AsyncLLMEngine) -> None:
    watched = WatchedEngine(engine)
    watched.script = Script(num_outputs=2)  # then it is held
    routes = {label: (ROUTES[label], ROUTES[label].Options()) for label in ("completions", "explain")}
    body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "stream": True, "request_id": "mine"}
    with live_server(watched, routes) as live, httpx.Client(base_url=live.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body):
            assert watched.is_waiting.wait(60)
            # The step after the one of its last token holds it.
            wait_until(lambda: explained(client, "cmpl-mine")[0]["state"] == "held", "the request is held")
            (found,) = explained(client, "cmpl-mine")
            assert 0 < found["output"]["tokens"] < 200
            assert found["output"]["finish_reason"] is None
        wait_until(lambda: explained(client, "mine")[0]["state"] == "finished", "the client that left is noticed")
        assert explained(client, "mine")[0]["output"]["finish_reason"] == "abort"


def test_prefixes_of_ids_may_be_left_out(client: httpx.Client) -> None:
    ran(client, request_id="a/b")
    ran(client, "chat/completions", request_id="c")
    ran(client, "messages", request_id="d")
    response = client.post("/v1/responses", json=ENDPOINTS["responses"]).json()["id"]
    for short, whole in (("a/b", "cmpl-a/b"), ("c", "chatcmpl-c"), ("d", "msg-d"), (response[5:], response)):
        assert len(explained(client, short)) == 1
        assert explained(client, short)[0]["request_id"] == explained(client, whole)[0]["request_id"]


def test_a_response_with_several_prompts_is_several_requests(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"prompt": ["a", "bc"], "max_tokens": 2, "request_id": "two"})
    found = explained(client, response.json()["id"])
    assert sorted(each["prompt"]["tokens"] for each in found) == [1, 2]
    (one,) = explained(client, found[0]["request_id"])
    assert one["request_id"] == found[0]["request_id"]


def test_part_of_an_id_finds_nobodys_request(client: httpx.Client, check_error: CheckError) -> None:
    ran(client, request_id="tenant-1")
    assert len(explained(client, "tenant-1")) == 1
    for part in ("cmpl", "cmpl-", "cmpl-tena", "cmpl-tenant", "tenant", "-", "cmpl-tenant-1-", "%2A"):
        check_error(client.get(f"/v1/explain/{part}"), 404, "request_id")


def test_no_text_is_told(client: httpx.Client) -> None:
    secret = "xyzzy plugh"
    response = client.post(
        "/v1/completions",
        json={"prompt": secret, "max_tokens": 3, "cache_salt": "hushhush", "guided_choice": ["frotz"], "user": "ozmoo"},
    )
    told = client.get(f"/v1/explain/{response.json()['id']}").text
    words = (secret, "plugh", "hushhush", "frotz", "ozmoo", response.json()["choices"][0]["text"].strip() or secret)
    assert not [word for word in words if word in told]


def test_an_unknown_id_is_a_404_that_says_how_many_are_kept(client: httpx.Client, check_error: CheckError) -> None:
    for index in range(KEPT + 1):
        ran(client, request_id=f"old-{index}")
    error = check_error(client.get("/v1/explain/old-0"), 404, "request_id")
    assert f"the {KEPT} that ended last (server.kept_requests)" in error["message"]
    assert len(explained(client, "old-1")) == 1


def test_the_arm_of_an_experiment_is_why(story_model: Path) -> None:
    config = {
        "model": {"path": str(story_model), "dtype": "float32", "max_model_len": 256},
        "cache": {"block_size": 4, "num_blocks": 200},
        "executor": {"threads": 1},
        "speculative": {"drafters": {"lookup": {"name": "ngram", "num_tokens": 4}}, "default": None},
        "experiments": {"try": {"arms": {"plain": {"speculation": "off"}, "with": {"speculation": "lookup"}}, **USERS}},
    }
    routes = {label: (ROUTES[label], ROUTES[label].Options()) for label in ("completions", "explain")}
    with (
        AsyncLLMEngine.from_config(config) as engine,
        live_server(engine, routes) as live,
        httpx.Client(base_url=live.url, timeout=60) as client,
    ):
        planned = plan(client, "completions")["speculation"]
        assert planned["drafter"] is None
        assert "the config's experiments (try) may choose another" in planned["why"]
        told = [ran(client, user=f"somebody-{index}") for index in range(12)]
        named = ran(client, user="somebody-1", speculation="lookup")
    drafters = {each["experiment"]["arm"]: each["speculation"]["drafter"] for each in told}
    assert drafters == {"plain": None, "with": "lookup"}
    assert all(
        each["experiment"]["name"] == "try" and "of experiment 'try'" in each["speculation"]["why"] for each in told
    )
    assert "somebody" not in repr(told)
    assert named["experiment"] is None
    assert named["speculation"]["why"].startswith("the request names it (speculation)")


def test_an_id_that_is_too_long_is_refused(client: httpx.Client, check_error: CheckError) -> None:
    error = check_error(
        client.post("/v1/completions", json={**ENDPOINTS["completions"], "request_id": "x" * 513}), 400, "request_id"
    )
    assert "may have 512" in error["message"]


def test_a_key_is_needed(engine: AsyncLLMEngine, check_error: CheckError) -> None:
    with live_server(engine, {"explain": (ExplainRoute, PluginOptions())}, api_keys=("k",)) as live:
        check_error(httpx.get(f"{live.url}/v1/explain/x", timeout=60), 401)
        check_error(httpx.post(f"{live.url}/v1/explain/completions", json={"prompt": "x"}, timeout=60), 401)
        check_error(httpx.get(f"{live.url}/v1/explain/x", headers={"authorization": "Bearer k"}, timeout=60), 404)
