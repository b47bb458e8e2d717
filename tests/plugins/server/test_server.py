"""What the server does around its routes: keys, limits, errors, its end."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from dovetail import AsyncLLMEngine
from dovetail.contracts.errors import ConfigError, QueueFull, RequestError, WorkerError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import APIError, Route
from dovetail.plugins.routes.completions.route import CompletionsRoute
from dovetail.plugins.routes.health import HealthRoute
from dovetail.plugins.routes.metrics import MetricsRoute
from dovetail.plugins.routes.models import ModelsRoute
from dovetail.plugins.routes.tokenize import TokenizeRoute
from dovetail.plugins.server.api import listen
from dovetail.plugins.server.live import LiveServer, live_server
from dovetail.plugins.server.settings import CORSSettings, ServerSettings, TLSSettings
from tests.waiting import wait_until

CheckError = Callable[..., dict[str, Any]]
OPTIONS = PluginOptions()


class Raises(Route):
    """Endpoints that go wrong."""

    contract = (1, 0)

    def router(self) -> APIRouter:
        router = APIRouter()
        router.get("/raise/{name}")(self.fail)
        router.get("/stream/{name}")(self.fail_in_stream)
        router.get("/validated")(self.validated)
        router.get("/wait")(self.wait)
        router.post("/read")(self.read)
        return router

    def error(self, name: str) -> Exception:
        return {
            "request": RequestError("no such thing"),
            "full": QueueFull("too many", retry_after_s=2.5),
            "worker": WorkerError("rank 1 died"),
            "teapot": APIError(418, "short and stout", param="handle", code="tea", headers={"x-tea": "green"}),
            "bug": ZeroDivisionError("secret detail"),
            "late": TimeoutError("the endpoint's own"),
        }[name]

    async def fail(self, name: str) -> None:
        raise self.error(name)

    async def fail_in_stream(self, request: Request, name: str, frames: int = 1) -> Response:
        async def generate() -> AsyncGenerator[bytes, None]:
            for index in range(frames):
                yield b"data: %d\n\n" % index
            raise self.error(name)

        return self.host.event_stream(request, generate())

    async def validated(self, count: int) -> dict[str, int]:
        return {"count": count}

    async def wait(self, request: Request, frames: int = 0) -> Response:
        async def generate() -> AsyncGenerator[bytes, None]:
            for index in range(frames):
                yield b"data: %d\n\n" % index
            await asyncio.Event().wait()

        if frames:
            return self.host.event_stream(request, generate())
        await asyncio.Event().wait()
        return Response()

    async def read(self, request: Request) -> dict[str, int]:
        return {"length": len(await request.body())}


def need_admin(request: Request) -> None:
    if request.headers.get("x-admin") != "yes":
        raise APIError(403, "admins only")


class Guarded(Route):
    """An endpoint that takes the request alone, behind a dependency of FastAPI: of itself, of its router, of a router
    inside."""

    contract = (1, 0)

    def router(self) -> APIRouter:
        guards = [Depends(need_admin)]
        guarded, outer = APIRouter(prefix="/by-router", dependencies=guards), APIRouter(prefix="/guarded")
        guarded.get("")(self.answer)
        outer.get("/itself", dependencies=guards)(self.answer)
        outer.include_router(guarded)
        return outer

    async def answer(self, request: Request) -> Response:
        return Response("in")


class GuardedWhole(Guarded):
    """The router that the server mounts has the dependency."""

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/whole", dependencies=[Depends(need_admin)])
        router.get("/itself")(self.answer)
        return router


ROUTES = {"health": (HealthRoute, OPTIONS), "models": (ModelsRoute, OPTIONS), "raises": (Raises, OPTIONS)}


def talk(server: LiveServer, sent: bytes, timeout_s: float = 30) -> bytes:
    """Everything that comes back over a connection of its own, until the server closes it."""
    with socket.create_connection(server.address, timeout=timeout_s) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def error_of(answer: bytes) -> dict[str, Any]:
    """The error in what `talk` returned."""
    error: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return error


@pytest.fixture(scope="module")
def raising(engine: AsyncLLMEngine) -> Any:
    with live_server(engine, ROUTES, api_keys=("first", "second"), max_body_mib=0.5) as live:
        yield live


@pytest.fixture
def caller(raising: LiveServer) -> Any:
    with httpx.Client(base_url=raising.url, headers={"authorization": "Bearer second"}, timeout=60) as created:
        yield created


@pytest.mark.parametrize(
    ("name", "status", "kind"),
    [
        ("request", 400, "invalid_request_error"),
        ("full", 429, "rate_limit_error"),
        ("worker", 503, "overloaded_error"),
        ("teapot", 418, "invalid_request_error"),
        ("bug", 500, "api_error"),
        ("late", 500, "api_error"),
    ],
)
@pytest.mark.parametrize("path", ["/raise/{}", "/stream/{}?frames=0"])
def test_what_an_endpoint_raises_becomes_an_error(
    caller: httpx.Client, check_error: CheckError, path: str, name: str, status: int, kind: str
) -> None:
    error = check_error(caller.get(path.format(name)), status)
    assert error["type"] == kind


def test_errors_say_when_to_try_again(caller: httpx.Client) -> None:
    assert caller.get("/raise/full").headers["retry-after"] == "3"
    assert int(caller.get("/raise/worker").headers["retry-after"]) >= 1


def test_an_api_error_is_written_as_it_is(caller: httpx.Client) -> None:
    response = caller.get("/raise/teapot")
    assert response.headers["x-tea"] == "green"
    assert response.json()["error"] == {
        "message": "short and stout",
        "type": "invalid_request_error",
        "param": "handle",
        "code": "tea",
    }


def test_a_bug_is_logged_and_not_shown(caller: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "dovetail.server"):
        response = caller.get("/raise/bug")
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert any(record.exc_info and "secret detail" in str(record.exc_info[1]) for record in caplog.records)


def test_an_error_in_a_stream_is_its_last_event(caller: httpx.Client) -> None:
    first, last, rest = caller.get("/stream/worker").text.split("\n\n")
    assert (first, rest) == ("data: 0", "")
    assert json.loads(last.removeprefix("event: error\ndata: "))["error"]["type"] == "overloaded_error"


def test_a_client_that_left_is_a_499_in_the_log(raising: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "dovetail.server"):
        with socket.create_connection(raising.address) as connection:
            connection.sendall(b"GET /wait HTTP/1.1\r\nhost: a\r\nx-api-key: first\r\n\r\n")
            wait_until(lambda: bool(raising.host.under_way), "the endpoint runs", 30)
        wait_until(lambda: not raising.host.under_way, "the endpoint was ended", 30)
    assert "GET /wait: 499, the client left" in caplog.messages


@pytest.mark.parametrize("query", ["", "?count=many"])
def test_what_fastapi_validates_is_a_400(caller: httpx.Client, check_error: CheckError, query: str) -> None:
    check_error(caller.get(f"/validated{query}"), 400, "count")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer first"}, 200),
        ({"authorization": "bearer second"}, 200),
        ({"x-api-key": "second"}, 200),
        ({"authorization": "Bearer firs"}, 401),
        ({"authorization": "Bearer first!"}, 401),
        ({"authorization": "Basic first"}, 401),
        ({"authorization": "first"}, 401),
        ({"authorization": "Bearer f\xfcr"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
def test_a_key_is_asked_for(raising: LiveServer, headers: dict[str, str], status: int) -> None:
    given = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    response = httpx.get(f"{raising.url}/v1/models", headers=given, timeout=60)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/live", "/version", "/docs", "/openapi.json"])
def test_some_paths_are_open(raising: LiveServer, path: str) -> None:
    assert httpx.get(raising.url + path, timeout=60).status_code == 200


def test_unknown_paths_are_not_told_without_a_key(raising: LiveServer) -> None:
    assert httpx.get(f"{raising.url}/nothing", timeout=60).status_code == 401


def test_an_announced_gigabyte_is_refused_unread(raising: LiveServer) -> None:
    head = b"POST /read HTTP/1.1\r\nhost: a\r\nx-api-key: first\r\ncontent-length: 1000000000\r\n\r\n"
    answer = talk(raising, head)
    assert answer.startswith(b"HTTP/1.1 413")
    assert error_of(answer)["type"] == "request_too_large"


def test_a_chunked_body_is_cut_at_the_limit(raising: LiveServer) -> None:
    head = b"POST /read HTTP/1.1\r\nhost: a\r\nx-api-key: first\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    assert talk(raising, head + chunk * 9).startswith(b"HTTP/1.1 413")
    assert b'{"length":65536}' in talk(
        raising, head.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n") + chunk + b"0\r\n\r\n"
    )


def test_what_is_no_http_is_a_400(raising: LiveServer) -> None:
    answer = talk(raising, b"\x16\x03\x01 not http\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert error_of(answer)["type"] == "invalid_request_error"


def test_endless_headers_are_refused(raising: LiveServer) -> None:
    lines = b"".join(b"x-%d: %s\r\n" % (index, b"a" * 1000) for index in range(70))
    assert talk(raising, b"GET /health HTTP/1.1\r\n" + lines).startswith(b"HTTP/1.1 431")


def test_slow_headers_and_bodies_are_given_up(engine: AsyncLLMEngine) -> None:
    with live_server(engine, ROUTES, header_timeout_s=0.2, body_timeout_s=0.2) as live:
        assert talk(live, b"GET /health HTTP/1.1\r\nhost: a\r\n").startswith(b"HTTP/1.1 408")
        answer = talk(live, b"POST /read HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\nab")
        assert answer.startswith(b"HTTP/1.1 408")
        assert error_of(answer)["type"] == "timeout_error"


def test_a_request_that_takes_too_long_is_ended(engine: AsyncLLMEngine, check_error: CheckError) -> None:
    with live_server(engine, ROUTES, request_timeout_s=0.2) as live:
        check_error(httpx.get(f"{live.url}/wait", timeout=60), 408)
        # 408 where the time was over before the first frame.
        answers = (httpx.get(f"{live.url}/wait?frames=1", timeout=60) for _ in range(100))
        begun = next(answer for answer in answers if answer.status_code != 408)
        first, last, rest = begun.text.split("\n\n")
        assert (first, rest) == ("data: 0", "")
        assert json.loads(last.removeprefix("event: error\ndata: "))["error"]["type"] == "timeout_error"


def test_cors_is_for_the_origins_that_are_named(engine: AsyncLLMEngine) -> None:
    with live_server(engine, ROUTES, cors=CORSSettings(allow_origins=("https://a.example",)), api_keys=("k",)) as live:
        asks = {"origin": "https://a.example", "access-control-request-method": "POST"}
        assert httpx.options(f"{live.url}/v1/models", headers=asks, timeout=60).status_code == 200
        refused = httpx.get(f"{live.url}/v1/models", headers={"origin": "https://a.example"}, timeout=60)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")
        other = httpx.options(f"{live.url}/v1/models", headers={**asks, "origin": "https://b.example"}, timeout=60)
        assert "access-control-allow-origin" not in other.headers


def test_a_draining_server_refuses_what_is_new(engine: AsyncLLMEngine, check_error: CheckError) -> None:
    with live_server(engine, ROUTES) as live:
        live.host.is_draining = True
        response = httpx.get(f"{live.url}/v1/models", timeout=60)
        assert "retry-after" in response.headers
        check_error(response, 503)
        check_error(httpx.get(f"{live.url}/ready", timeout=60), 503)
        assert httpx.get(f"{live.url}/health", timeout=60).status_code == 200


def test_the_end_lets_requests_finish_and_then_interrupts_them(engine: AsyncLLMEngine) -> None:
    events: list[str] = []
    first_came = threading.Event()

    def read(url: str) -> None:
        with httpx.stream("GET", f"{url}/wait?frames=1", timeout=60) as response:
            for line in response.iter_lines():
                events.append(line)
                first_came.set()

    with live_server(engine, ROUTES) as live:
        reader = threading.Thread(target=read, args=(live.url,))
        reader.start()
        assert first_came.wait(30)
    reader.join(30)
    assert events[2] == "event: error"
    assert "overloaded_error" in events[3]


def test_the_end_waits_for_requests_under_way(engine: AsyncLLMEngine) -> None:
    answers: list[str] = []
    first_came = threading.Event()

    def read(url: str) -> None:
        body = {"prompt": "Once", "max_tokens": 200, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            for text in response.iter_text():
                answers.append(text)
                first_came.set()

    routes = {"completions": (CompletionsRoute, CompletionsRoute.Options())}
    with live_server(engine, routes, drain_timeout_s=60) as live:
        reader = threading.Thread(target=read, args=(live.url,))
        reader.start()
        assert first_came.wait(30)
    reader.join(30)
    assert "".join(answers).endswith("data: [DONE]\n\n")


def test_https(engine: AsyncLLMEngine, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, which makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    ask = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*ask, *names], check=True, capture_output=True)
    tls = TLSSettings(certfile=str(certificate), keyfile=str(key))
    with live_server(engine, ROUTES, tls=tls) as live:
        context = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{live.url}/health", verify=context, timeout=60).status_code == 200
    assert live.url.startswith("https://")


def test_a_path_of_two_routes_is_refused_at_start(engine: AsyncLLMEngine) -> None:
    routes = {**ROUTES, "again": (ModelsRoute, OPTIONS)}
    with pytest.raises(ConfigError, match=r"GET /v1/models is an endpoint of route 'again' and of route 'models'"):
        live_server(engine, routes).__enter__()


def test_an_address_that_is_taken_is_refused(raising: LiveServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on http://127.0.0.1"):
        listen(ServerSettings(port=raising.address[1]))
    with pytest.raises(ConfigError, match=r"server.uds"):
        listen(ServerSettings(uds=str(tmp_path / "no" / "folder")))


def test_a_unix_socket_serves_and_a_dead_ones_file_is_taken_over(engine: AsyncLLMEngine, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    for _ in range(2):
        with (
            live_server(engine, ROUTES, uds=path),
            httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=60) as caller,
        ):
            assert caller.get("http://a/health").status_code == 200
            with pytest.raises(ConfigError):
                listen(ServerSettings(uds=path))


def test_a_prefix_that_a_proxy_takes_off(engine: AsyncLLMEngine) -> None:
    with live_server(engine, ROUTES, root_path="/llm", api_keys=("k",)) as live:
        assert httpx.get(f"{live.url}/health", timeout=60).status_code == 200
        assert httpx.get(f"{live.url}/v1/models", headers={"x-api-key": "k"}, timeout=60).status_code == 200
        assert httpx.get(f"{live.url}/openapi.json", timeout=60).json()["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize("path", ["/guarded/itself", "/guarded/by-router", "/whole/itself"])
def test_dependencies_of_fastapi_run(engine: AsyncLLMEngine, check_error: CheckError, path: str) -> None:
    with live_server(engine, {"guarded": (Guarded, OPTIONS), "whole": (GuardedWhole, OPTIONS)}) as live:
        check_error(httpx.get(live.url + path, timeout=60), 403)
        assert httpx.get(live.url + path, headers={"x-admin": "yes"}, timeout=60).text == "in"


def test_an_openapi_document_names_the_fields(raising: LiveServer, server: LiveServer) -> None:
    document = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "min_p", "speculation"} <= set(body["properties"])


def test_keys_are_in_no_text_of_the_settings() -> None:
    assert "hush" not in repr(ServerSettings(api_keys=("hush",)))


def test_metrics_are_the_engines(story_model: Path) -> None:
    config = {"model": str(story_model), "cache": {"num_blocks": 40}, "telemetry": ["prometheus"]}
    routes = {"metrics": (MetricsRoute, OPTIONS)}
    with AsyncLLMEngine.from_config(config) as engine, live_server(engine, routes) as live:
        response = httpx.get(f"{live.url}/metrics", timeout=60)
        exposition = asyncio.run(engine.metrics())
        assert response.headers["content-type"] == exposition.content_type
        names = {line.split()[2] for line in exposition.body.decode().splitlines() if line.startswith("# HELP")}
        assert names
        assert names == {line.split()[2] for line in response.text.splitlines() if line.startswith("# HELP")}


def test_without_a_sink_that_counts_there_are_no_metrics(client: httpx.Client, check_error: CheckError) -> None:
    error = check_error(client.get("/metrics"), 404)
    assert "telemetry" in error["message"]


def test_tokenize_and_back(client: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "return_token_strs": True}
    answer = client.post("/tokenize", json=body).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert "".join(answer["token_strs"]) == "Once upon a time"
    assert answer["max_model_len"] == 256
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "Once upon a time"}


def test_the_openai_client(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["story", "fable"]
        whole = client.completions.create(
            model="story", prompt="Once", temperature=0, logprobs=1, extra_body={"top_k": 1}
        )
        assert whole.choices[0].logprobs is not None
        chunks = client.completions.create(
            model="story", prompt="Once", temperature=0, stream=True, stream_options={"include_usage": True}
        )
        taken = list(chunks)
        assert "".join(choice.text for chunk in taken for choice in chunk.choices) == whole.choices[0].text
        assert taken[-1].usage == whole.usage
        with pytest.raises(openai.NotFoundError, match="other"):
            client.completions.create(model="other", prompt="Once")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="story", prompt="Once", temperature=-1)


def test_an_engine_that_ended_is_unavailable_and_logged_once(
    story_model: Path, check_error: CheckError, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"model": {"path": str(story_model), "dtype": "float32"}, "cache": {"num_blocks": 40}}
    engine = AsyncLLMEngine.from_config(config)
    with live_server(engine, {**ROUTES, "tokenize": (TokenizeRoute, OPTIONS)}) as live:
        engine.shutdown()
        with caplog.at_level(logging.INFO, "dovetail.server"):
            for path in ("health", "ready") * 3:
                assert "ended for good" in check_error(httpx.get(f"{live.url}/{path}", timeout=60), 503)["message"]
        (record,) = [record for record in caplog.records if record.name == "dovetail.server"]
        assert (record.levelname, record.exc_info) == ("WARNING", None)
        assert httpx.get(f"{live.url}/live", timeout=60).status_code == 200


def test_an_api_process_imports_no_torch() -> None:
    code = (
        "import sys, dovetail.plugins.server.api, dovetail.plugins.server.app\n"
        "from dovetail.registry import Registry\n"
        "registry = Registry.scan()\n"
        "loaded = [registry.load_entry(entry) for entry in registry.entries('route')]\n"
        "assert len(loaded) >= 5\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'triton'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
