"""`dovetail proxy`: prefill on one live server, decode on another, and what happens when one of them is gone."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import uvicorn
from typer.testing import CliRunner

from dovetail import AsyncLLMEngine
from dovetail.commands.http import create_client
from dovetail.contracts.errors import ConfigError
from dovetail.plugins.commands.proxy.command import ProxyCommand
from dovetail.plugins.commands.proxy.forwarding import Proxy
from dovetail.plugins.commands.proxy.servers import Servers
from dovetail.plugins.routes.chat.route import ChatRoute
from dovetail.plugins.routes.completions.route import CompletionsRoute
from dovetail.plugins.routes.models import ModelsRoute
from dovetail.plugins.server.live import live_server
from dovetail.testing.chat_models import FAMILIES, save_chat_model
from dovetail.testing.watched_engine import Script, WatchedEngine
from tests.ports import free_ports
from tests.waiting import wait_until

KINDS = (CompletionsRoute, ChatRoute, ModelsRoute)
ROUTES = {kind.__name__: (kind, kind.Options()) for kind in KINDS}
PROMPT = "What was computed once is not computed again, wherever it was. " * 2
COMPLETE = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
HALF = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'


@dataclass(frozen=True)
class Site:
    """Two servers, and what talks to them."""

    prefill: str
    decode: str
    engines: tuple[AsyncLLMEngine, AsyncLLMEngine]
    """Of both."""

    def ask(
        self, path: str, body: dict[str, Any], prefill_timeout_s: float = 60.0, **servers: list[str]
    ) -> httpx.Response:
        """Of a proxy that was made for this request."""
        return asyncio.run(self._ask(path, [body], prefill_timeout_s, servers))[0]

    def ask_in_turn(self, path: str, bodies: list[dict[str, Any]], prefill_timeout_s: float) -> list[httpx.Response]:
        """Of one proxy, one request after the other."""
        return asyncio.run(self._ask(path, bodies, prefill_timeout_s, {}))

    async def _ask(
        self, path: str, bodies: list[dict[str, Any]], prefill_timeout_s: float, servers: dict[str, list[str]]
    ) -> list[httpx.Response]:
        prefill, decode = servers.get("prefill", [self.prefill]), servers.get("decode", [self.decode])
        proxy = Proxy(Servers(prefill), Servers(decode), create_client(), prefill_timeout_s)
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(proxy.app()), base_url="http://proxy") as client:
                return [await client.post(path, json=body) for body in bodies]
        finally:
            await proxy.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    model: Path = tmp_path_factory.mktemp("proxied")
    save_chat_model(model, FAMILIES["hermes"])
    port = free_ports()
    connectors = (
        {"name": "peer", "role": "producer", "port": port},
        {"name": "peer", "role": "consumer", "peers": [f"127.0.0.1:{port}"]},
    )
    with ExitStack() as stack:
        urls, engines = [], []
        for connector in connectors:
            config: dict[str, Any] = {
                "model": {"path": str(model), "dtype": "float32", "max_model_len": 1024},
                "cache": {"num_blocks": 400, "block_size": 4},
                "executor": {"threads": 1},
                "kv_connector": connector,
            }
            engine = stack.enter_context(AsyncLLMEngine.from_config(config))
            engines.append(engine)
            urls.append(stack.enter_context(live_server(engine, ROUTES, model_names=("tiny",))).url)
        yield Site(urls[0], urls[1], (engines[0], engines[1]))


@pytest.fixture
def gone() -> Iterator[str]:
    """The address of a server that is not there."""
    with socket.socket() as nobody:  # bound, and does not listen
        nobody.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{nobody.getsockname()[1]}"


@contextmanager
def live_proxy(site: Site) -> Iterator[int]:
    """A proxy behind a port."""
    proxy = Proxy(Servers([site.prefill]), Servers([site.decode]), create_client(), 60.0)
    server = uvicorn.Server(uvicorn.Config(proxy.app(), log_config=None, timeout_graceful_shutdown=5))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def paused(engine: AsyncLLMEngine) -> Iterator[None]:
    """It takes requests and computes nothing, as a process that is stopped."""
    asyncio.run(engine.pause("keep"))
    try:
        yield
    finally:
        asyncio.run(engine.resume())


@contextmanager
def half_a_stream() -> Iterator[str]:
    """A server that dies while it streams an answer."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            part = HALF + b'data: {"cho'
            connection.sendall(head + b"%x\r\n%s\r\n" % (len(part), part))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def shown(response: httpx.Response) -> tuple[Any, int]:
    """The first choice, and how many prompt tokens were found."""
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETE), ("/v1/chat/completions", CHAT)])
def test_the_decode_server_finds_what_the_prefill_server_computed(site: Site, path: str, body: dict[str, Any]) -> None:
    salted = {**body, "cache_salt": "nobody else's"}
    expected = httpx.post(site.prefill + path, json=body, timeout=60).json()["choices"]
    choices, found = shown(site.ask(path, salted))
    assert choices == expected
    assert found > 50


def test_streams_come_as_they_are(site: Site) -> None:
    body = {**COMPLETE, "stream": True, "stream_options": {"include_usage": True}, "n": 1}
    direct = httpx.post(f"{site.decode}/v1/completions", json=COMPLETE, timeout=60).json()["choices"][0]["text"]
    lines = [line[6:] for line in site.ask("/v1/completions", body).text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    events = [httpx.Response(200, content=line).json() for line in lines]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == direct


def test_without_a_prefill_server_the_decode_server_computes(site: Site, gone: str) -> None:
    choices, found = shown(site.ask("/v1/completions", {**COMPLETE, "cache_salt": "alone"}, prefill=[gone]))
    assert (choices[0]["finish_reason"], found) == ("length", 0)


def test_a_prefill_server_that_takes_too_long_is_waited_for_and_warned_of_once(
    site: Site, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_silence = Servers.note_silence
    # However late the second request comes, the server is left out still.
    monkeypatch.setattr(Servers, "note_silence", lambda servers, url, for_s: note_silence(servers, url, 1200 * for_s))
    bodies = [{**COMPLETE, "cache_salt": f"late {number}"} for number in range(2)]
    with paused(site.engines[0]), caplog.at_level(logging.WARNING, "dovetail.proxy"):
        answers = site.ask_in_turn("/v1/completions", bodies, prefill_timeout_s=3.0)
        # The proxy has hung up: nothing of the request waits there for the engine to go on.
        wait_until(lambda: not site.engines[0]._engine.request_ids, "the prefill server aborts the request")
    for choices, found in map(shown, answers):
        assert (choices[0]["finish_reason"], found) == ("length", 0)
    (warning,) = [one.getMessage() for one in caplog.records if one.name == "dovetail.proxy"]
    assert warning == (
        f"no prefill server answers, and a decode server computes the prompt: {site.prefill}: it took too long"
    )


@pytest.mark.parametrize("role", [0, 1], ids=["prefill", "decode"])
def test_a_client_that_hangs_up_is_aborted_where_its_request_is(site: Site, role: int) -> None:
    engine = site.engines[role]
    body = orjson.dumps({**COMPLETE, "cache_salt": f"gone {role}"})
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: proxy\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    with live_proxy(site) as port, paused(engine):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head % len(body) + body)
            wait_until(lambda: len(engine._engine.request_ids) == 1, "the request is there")
        wait_until(lambda: not engine._engine.request_ids, "the request is aborted")
    assert not site.engines[1 - role]._engine.request_ids


def test_a_client_that_hangs_up_amid_a_stream_is_aborted(site: Site) -> None:
    engine, long = site.engines[1], {**COMPLETE, "stream": True, "max_tokens": 800}
    watched = WatchedEngine(engine)
    watched.script = Script(num_outputs=1)  # then it is held
    with (
        live_server(watched, ROUTES, model_names=("tiny",)) as decode,
        live_proxy(replace(site, decode=decode.url)) as port,
    ):
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=long, timeout=60) as response:
            lines = response.iter_lines()  # which ends the stream when nobody has it any more
            next(lines)
            assert watched.is_waiting.wait(60)
            assert len(engine._engine.request_ids) == 1
        wait_until(lambda: not engine._engine.request_ids, "the request is aborted")


def test_another_decode_server_is_asked_or_the_failure_reported(site: Site, gone: str) -> None:
    assert shown(site.ask("/v1/completions", COMPLETE, decode=[gone, site.decode]))[0]
    failed = site.ask("/v1/completions", COMPLETE, decode=[gone])
    assert failed.status_code == 502
    assert gone in failed.json()["error"]["message"]


def test_a_stream_whose_server_dies_ends_with_an_error(site: Site) -> None:
    with half_a_stream() as url:
        answer = site.ask("/v1/completions", {**COMPLETE, "stream": True}, decode=[url]).content
    assert answer.startswith(HALF + b"data: {")
    assert f"the decode server {url} failed while it answered".encode() in answer


def test_requests_are_refused_in_the_terms_of_the_client(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    refused = site.ask("/v1/completions", {**COMPLETE, "temperature": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    given = site.ask("/v1/completions", {**COMPLETE, "kv_transfer_params": {}})
    assert given.status_code == 400
    unknown = site.ask("/v1/embeddings", COMPLETE)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, 404)
    assert not [one for one in caplog.records if one.name == "dovetail.proxy"]


def test_a_prefill_server_without_a_producer_costs_no_request(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    answer = site.ask("/v1/completions", COMPLETE, prefill=[site.decode], decode=[site.prefill])
    assert shown(answer)[0]
    (warning,) = [one.getMessage() for one in caplog.records if one.name == "dovetail.proxy"]
    assert f"refuses: {site.decode}: 400" in warning


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2", "--port", str(port)]
        result = CliRunner().invoke(ProxyCommand().app(), arguments)
    assert isinstance(result.exception, ConfigError)
    assert f"the proxy cannot listen on 127.0.0.1:{port}" in str(result.exception)
    assert result.output == ""


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"do_remote_prefil": True}, ".do_remote_prefil: no such key; there are do_remote_prefill,"),
        ({"do_remote_prefill": "true"}, ".do_remote_prefill is 'true': send true or false"),
        ({"remote_host": "127.0.0.1", "remote_port": "7150"}, ".remote_port is '7150': send a whole number"),
        ({"remote_host": "127.0.0.1", "remote_port": 65536}, ".remote_port is 65536: send a whole number"),
        ({"remote_host": 7, "remote_port": 7150}, ".remote_host is 7: send an address"),
        ({"remote_host": "127.0.0.1"}, "send remote_port as"),
        ({"do_remote_prefill": True}, "send remote_host and remote_port as"),
    ],
)
def test_params_that_would_be_ignored_are_refused(site: Site, params: dict[str, Any], says: str) -> None:
    refused = httpx.post(f"{site.decode}/v1/completions", json={**COMPLETE, "kv_transfer_params": params}, timeout=60)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "kv_transfer_params"), error
    assert says in error["message"]


def test_params_of_other_connectors_are_taken(site: Site) -> None:
    """What a client of vLLM sends to a prefill server, and what a plugin may have of its own."""
    names = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    begins = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(names)}
    own = {"do_remote_prefill": True, "acme.slot": 3, "tp_size": 1}
    for url, params in ((site.prefill, begins), (site.decode, own)):
        taken = httpx.post(f"{url}/v1/completions", json={**COMPLETE, "kv_transfer_params": params}, timeout=60)
        assert taken.status_code == 200, taken.text


def test_what_no_producer_and_no_stream_can_answer_is_refused(site: Site) -> None:
    begins = {**COMPLETE, "kv_transfer_params": {"do_remote_decode": True}}
    for url, more in ((site.decode, {}), (site.prefill, {"stream": True}), (site.prefill, {"extra": begins})):
        refused = httpx.post(f"{url}/v1/completions", json={**begins, **more}, timeout=60)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_transfer_params"), refused.text
