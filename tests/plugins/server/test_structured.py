"""The form of an output, asked for over HTTP."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from dovetail import AsyncLLMEngine
from dovetail.contracts.errors import RequestError
from dovetail.contracts.grammar import CompiledGrammar, Grammar, GrammarCapabilities
from dovetail.contracts.grammar_spec import GrammarSpec
from dovetail.plugins.routes.completions.route import CompletionsRoute
from dovetail.plugins.server.live import live_server

END = 2
"""Token id of </s>, with which a form ends."""

SCHEMA = {"enum": ["red", "blue"]}


@pytest.fixture(scope="module")
def client(story_model: Path) -> Iterator[httpx.Client]:
    model = {"path": str(story_model), "dtype": "float32", "hf_overrides": {"eos_token_id": END}}
    routes = {"completions": (CompletionsRoute, CompletionsRoute.Options())}
    with (
        AsyncLLMEngine.from_config({"model": model, "cache": {"num_blocks": 200}}) as engine,
        live_server(engine, routes) as live,
        httpx.Client(base_url=live.url, timeout=60) as created,
    ):
        yield created


def text_of(client: httpx.Client, **fields: Any) -> str:
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 60, **fields}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    text: str = choice["text"]
    return text


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        {"guided_json": SCHEMA},
    ],
)
def test_a_schema(client: httpx.Client, fields: dict[str, Any]) -> None:
    assert json.loads(text_of(client, **fields)) in ("red", "blue")


@pytest.mark.parametrize("fields", [{"guided_regex": "[0-9]{3}"}, {"structured_outputs": {"regex": "[0-9]{3}"}}])
def test_a_regular_expression(client: httpx.Client, fields: dict[str, Any]) -> None:
    assert re.fullmatch("[0-9]{3}", text_of(client, **fields))


def test_a_choice(client: httpx.Client) -> None:
    assert text_of(client, guided_choice=["red", "blue"]) in ("red", "blue")


def test_a_grammar(client: httpx.Client) -> None:
    assert text_of(client, guided_grammar='root ::= "yes" | "no"') in ("yes", "no")


def test_text_is_any(client: httpx.Client) -> None:
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 2, "response_format": {"type": "text"}}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == " upon a"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"typ": "text"}}, "response_format.typ"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_regex": "("}, None),
        ({"guided_json": {"type": "no type"}}, None),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_is_no_form_is_refused(
    client: httpx.Client, check_error: Callable[..., Any], fields: dict[str, Any], param: str | None
) -> None:
    check_error(client.post("/v1/completions", json={"prompt": "Once", **fields}), 400, param)


class Hanging(Grammar):
    """Never comes back while the test runs."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = GrammarCapabilities(forms=frozenset({"regex"}))
    is_over = threading.Event()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self.is_over.wait()
        raise RequestError("too late")


def test_a_grammar_whose_compilation_hangs_is_refused_and_the_engine_goes_on(story_model: Path) -> None:
    config = {
        "model": {"path": str(story_model), "dtype": "float32", "hf_overrides": {"eos_token_id": END}},
        "cache": {"num_blocks": 200},
        "grammar": {"name": f"{__name__}:Hanging", "wait_seconds": 0.2},
    }
    routes = {"completions": (CompletionsRoute, CompletionsRoute.Options())}
    body = {"prompt": "Once", "temperature": 0, "max_tokens": 2}
    with (
        AsyncLLMEngine.from_config(config) as engine,
        live_server(engine, routes) as live,
        httpx.Client(base_url=live.url, timeout=60) as client,
    ):
        refused = client.post("/v1/completions", json={**body, "guided_regex": "[0-9]"})
        assert refused.status_code == 400
        assert "grammar.wait_seconds" in refused.json()["error"]["message"]
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == " upon a"
    Hanging.is_over.set()
