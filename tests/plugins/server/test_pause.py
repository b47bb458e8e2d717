"""An engine behind a server is paused and put to sleep by vLLM's endpoints; what is illegal is a 409."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dovetail import AsyncLLMEngine
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route
from dovetail.plugins.routes.completions.route import CompletionsRoute
from dovetail.plugins.routes.pause import PauseRoute
from dovetail.plugins.server.live import live_server

BODY = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
ALLOWED = PauseRoute.Options.model_validate({"allow_control": True})


@pytest.fixture(scope="module")
def client(story_model: Path) -> Iterator[httpx.Client]:
    config = {
        "model": {"path": str(story_model), "dtype": "float32", "max_model_len": 256},
        "cache": {"block_size": 4, "num_blocks": 100},
        "executor": {"threads": 1},
    }
    routes: dict[str, tuple[type[Route], PluginOptions]] = {
        "completions": (CompletionsRoute, CompletionsRoute.Options()),
        "pause": (PauseRoute, ALLOWED),
    }
    with (
        AsyncLLMEngine.from_config(config) as engine,
        live_server(engine, routes, model_names=("story",)) as live,
        httpx.Client(base_url=live.url, timeout=60) as created,
    ):
        yield created


def tokens(client: httpx.Client) -> list[int]:
    response = client.post("/v1/completions", json=BODY)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def refused(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


def test_a_whole_round(client: httpx.Client) -> None:
    before = tokens(client)
    assert client.post("/pause", params={"mode": "wait"}).json() == {"status": "paused"}
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.post("/sleep", params={"level": 2}).status_code == 200
    asleep = {"weights": "asleep", "kv_cache": "asleep"}
    assert client.get("/is_sleeping").json() == {"is_sleeping": True, "regions": asleep}
    assert refused(client.post("/sleep"))[0] == 409
    assert refused(client.post("/resume")) == (409, "a paused engine that sleeps cannot resume: call wake_up first")
    assert refused(client.post("/wake_up", params={"tags": "kv_cache"}))[0] == 409
    assert client.post("/wake_up", params={"tags": "weights"}).status_code == 200
    assert client.get("/is_sleeping").json()["regions"] == {**asleep, "weights": "resident"}
    assert client.post("/wake_up", params={"tags": ["kv_cache"]}).status_code == 200
    assert refused(client.post("/wake_up")) == (409, "the engine is awake")
    assert client.get("/is_sleeping").json()["is_sleeping"] is False
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(tokens, client)
        assert client.post("/resume").json() == {"status": "resumed"}
        assert held.result(timeout=60) == before


def test_requests_of_a_sleeping_engine_are_conflicts(client: httpx.Client) -> None:
    assert client.post("/sleep").status_code == 200
    assert refused(client.post("/v1/completions", json=BODY)) == (409, "the engine sleeps: call wake_up first")
    assert client.post("/wake_up").status_code == 200


def test_a_stream_that_is_kept_goes_on_after_a_sleep(client: httpx.Client) -> None:
    body = {**BODY, "max_tokens": 200}
    wanted = client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    found: list[int] = []
    started = threading.Event()

    def read() -> None:
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    found.extend(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
                    started.set()

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert started.wait(60)
        client.post("/pause", params={"mode": "keep"})
        assert client.post("/sleep").status_code == 200
        assert client.post("/wake_up").status_code == 200
        client.post("/resume")
        reading.result(timeout=60)
    assert found == wanted


@pytest.mark.parametrize(
    ("path", "params", "message"),
    [
        ("/pause", {"mode": "stop"}, "pause mode 'stop'"),
        ("/sleep", {"level": 3}, "sleep level 3"),
        ("/sleep", {"mode": "abort"}, "sleep takes no mode"),
        ("/sleep", {"tags": "drafter:x"}, "no drafter 'drafter:x'"),
        ("/wake_up", {"tags": ["weights", "kv"]}, "no region 'kv'"),
    ],
)
def test_what_means_nothing_is_a_bad_request(
    client: httpx.Client, path: str, params: dict[str, Any], message: str
) -> None:
    status, text = refused(client.post(path, params=params))
    assert status == 400
    assert message in text
    assert client.get("/is_paused").json() == {"is_paused": False}
    assert client.get("/is_sleeping").json()["is_sleeping"] is False


def test_clients_may_not_unless_the_config_says_so(engine: AsyncLLMEngine) -> None:
    with live_server(engine, {"pause": (PauseRoute, PauseRoute.Options())}, model_names=("story",)) as live:
        for path in ("/pause", "/resume", "/sleep", "/wake_up"):
            status, text = refused(httpx.post(live.url + path, timeout=60))
            assert status == 403
            assert "allow_control" in text
