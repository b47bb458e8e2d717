"""The conformance suite of routes: a live server on a real socket over a small model. A third party's test is a
subclass::

    from dovetail.plugins.server.live import live_server
    from dovetail.testing import GeneratingRouteSuite

    class TestMyRoute(GeneratingRouteSuite):
        plugin = MyRoute
        serve = staticmethod(live_server)
        path = "/v1/mine"
        body_template = {"prompt": "$prompt", "max_tokens": "$num_tokens"}

`RouteSuite` holds for every route, `GeneratingRouteSuite` adds what must hold where an endpoint generates text.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

import httpx
import pytest

from dovetail.contracts.errors import QueueFull, WorkerError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route
from dovetail.engine.async_engine import AsyncLLMEngine
from dovetail.testing._checks import check_light_import
from dovetail.testing.story_model import save_story_model
from dovetail.testing.suite import SUITES, PluginSuite, overrides
from dovetail.testing.watched_engine import Script, WatchedEngine

MODEL = "story"
"""Name of the model that is served."""
MAX_MODEL_LEN = 256
PATIENCE_S = 20.0
"""After this time what a test waits for counts as never."""

_MALFORMED = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'"text"',
    b'{"a": NaN}',
    b'{"\xff": 1}',
    b'{"a": "\\ud800"}',
    b'{"a": ' + b"[" * 50_000,
)


class Live(Protocol):
    """A server that answers."""

    @property
    def url(self) -> str:
        """For HTTP clients."""

    @property
    def address(self) -> tuple[str, int]:
        """For a socket."""

    @property
    def host(self) -> Any:
        """Its `RouteHost`, with `under_way`: the requests that have no complete response."""

    @property
    def app(self) -> Any:
        """The ASGI application."""


Serve = Callable[..., AbstractContextManager[Live]]
"""`dovetail.plugins.server.live.live_server`, or what has its arguments."""


class RouteSuite(PluginSuite):
    """Tests of every route."""

    kind: ClassVar[str] = "route"
    plugin: ClassVar[type[Route]]
    function_attributes: ClassVar[frozenset[str]] = frozenset({"serve"})
    options: ClassVar[Mapping[str, Any]] = {}
    serve: ClassVar[Serve]

    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedEngine]:
        """A small model that tells a story."""
        directory: Path = tmp_path_factory.mktemp("story-model")
        save_story_model(directory)
        config = {
            "model": {"path": str(directory), "dtype": "float32", "max_model_len": MAX_MODEL_LEN},
            "cache": {"block_size": 4, "num_blocks": 400},
            "executor": {"threads": 1},
        }
        with AsyncLLMEngine.from_config(config) as created:
            yield WatchedEngine(created)

    @pytest.fixture
    def live(self, engine: WatchedEngine) -> Iterator[Live]:
        """The server. After the test no request is under way, no stream open and no KV block held."""
        engine.script = Script()
        engine.is_waiting.clear()
        engine.num_open = 0
        with self.server(engine) as live:
            yield live
            wait_until(lambda: not live.host.under_way, "all requests are complete")
            check_freed(engine)

    def server(self, engine: WatchedEngine, **settings: Any) -> AbstractContextManager[Live]:
        """A server with this route alone."""
        options: PluginOptions = self.plugin.Options.model_validate(dict(self.options))
        return type(self).serve(engine, {"tested": (self.plugin, options)}, model_names=(MODEL,), **settings)

    def test_needs_no_torch(self) -> None:
        """An API process stays small: importing the route does not import torch."""
        check_light_import(self.plugin.__module__)

    def test_its_paths_are_in_the_openapi_document(self, live: Live) -> None:
        """/openapi.json is written without an error and has every endpoint, open paths among them."""
        paths = self.endpoints(live)
        assert paths, "the route has no endpoint"
        assert self.plugin.open_paths <= paths.keys()

    def test_what_is_malformed_is_a_client_error(self, live: Live) -> None:
        """Whatever a body is, an endpoint answers, refuses it in the shape of all errors, or ignores a body."""
        for path, methods in self.endpoints(live).items():
            for method in methods:
                for body in _MALFORMED:
                    where = live.url + re.sub(r"\{.*?\}", "x", path)
                    answer = httpx.request(
                        method, where, content=body, headers={"content-type": "application/json"}, timeout=PATIENCE_S
                    )
                    assert answer.status_code < 500, f"{method} {path} with {body[:20]!r}: {answer.text}"
                    assert answer.status_code != 422, "a 400 is what clients expect"
                    if answer.status_code >= 400:
                        check_error(answer, answer.status_code)

    def test_it_can_be_mounted_again(self, engine: WatchedEngine) -> None:
        """Each API process has a route object of its own: nothing is shared between two."""
        for _ in range(2):
            with self.server(engine) as live:
                assert self.endpoints(live)

    def endpoints(self, live: Live) -> dict[str, list[str]]:
        """Methods by path."""
        document = httpx.get(f"{live.url}/openapi.json", timeout=PATIENCE_S).json()
        return {path: [method.upper() for method in methods] for path, methods in document["paths"].items()}


class GeneratingRouteSuite(RouteSuite):
    """Tests of an endpoint that generates text from a prompt, whole or as a stream."""

    path: ClassVar[str]
    body_template: ClassVar[Mapping[str, Any] | None] = None
    """A body that asks for no stream. "$prompt" in it stands for a prompt, "$num_tokens" for how many tokens shall
    follow."""
    streams: ClassVar[Mapping[str, Any] | None] = {"stream": True}
    """What makes a body ask for a stream; {}: the endpoint always streams; None: it never does."""
    end_of_stream: ClassVar[bytes] = b"data: [DONE]\n\n"
    """What a stream ends with that ended well."""

    @classmethod
    def reason_incomplete(cls) -> str | None:
        """An endpoint needs its path, and bodies of requests."""
        has_body = overrides(cls, GeneratingRouteSuite, "body") or cls.body_template is not None
        if "plugin" not in dir(cls) or ("path" in dir(cls) and has_body):
            return super().reason_incomplete()
        return cls._reason_unfit() or f"{cls.__name__} needs {SUITES[cls.kind].needs}"

    def body(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        """A request for this many tokens after a prompt: `body_template`, unless it is overridden."""
        filled: dict[str, Any] = _filled(self.body_template or {}, {"$prompt": prompt, "$num_tokens": num_tokens})
        return filled

    @pytest.fixture(params=["whole", "stream"])
    def extra(self, request: pytest.FixtureRequest) -> Mapping[str, Any]:
        """What a body has besides: nothing, or what asks for a stream."""
        if request.param == "whole":
            return {}
        if self.streams is None:
            pytest.skip("the endpoint has no stream")
        return self.streams

    @pytest.fixture
    def stream(self) -> Mapping[str, Any]:
        """What asks for a stream."""
        if self.streams is None:
            pytest.skip("the endpoint has no stream")
        return self.streams

    def ask(self, live: Live, extra: Mapping[str, Any], num_tokens: int = 8, **fields: Any) -> httpx.Response:
        """A request on a connection of its own."""
        body = {**self.body("Once upon a time", num_tokens), **extra, **fields}
        return httpx.post(live.url + self.path, json=body, timeout=PATIENCE_S)

    def test_a_request_is_answered(self, live: Live, extra: Mapping[str, Any]) -> None:
        """Status 200; a stream has its end."""
        answer = self.ask(live, extra)
        assert answer.status_code == 200, answer.text
        if extra:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.content.endswith(self.end_of_stream)

    def test_a_model_that_is_not_served_is_a_404(self, live: Live, extra: Mapping[str, Any]) -> None:
        """And one that is, is served."""
        assert self.ask(live, extra, model=MODEL).status_code == 200
        check_error(self.ask(live, extra, model="another"), 404)

    def test_a_prompt_that_is_too_long_is_refused(self, live: Live, extra: Mapping[str, Any]) -> None:
        """Before the status of a stream is sent."""
        body = {**self.body("a b c " * MAX_MODEL_LEN, 8), **extra}
        check_error(httpx.post(live.url + self.path, json=body, timeout=PATIENCE_S), 400)

    def test_a_field_of_another_type_is_refused_by_name(self, live: Live, extra: Mapping[str, Any]) -> None:
        """Each field of the suite's body in turn."""
        for name in self.body("Once", 8):
            wrong: dict[str, Any] = {name: {"of": "another type"}}
            error = check_error(self.ask(live, extra, **wrong), 400)
            assert str(error["param"]).split(".")[0] == name, f"param is {error['param']!r}, and {name} was wrong"

    def test_an_unknown_field_is_refused_by_name(self, live: Live, extra: Mapping[str, Any]) -> None:
        """What would be ignored may have changed the answer."""
        error = check_error(self.ask(live, extra, no_such_field=1), 400)
        assert "no_such_field" in error["message"]

    def test_a_client_that_leaves_before_the_first_token(
        self, live: Live, engine: WatchedEngine, extra: Mapping[str, Any]
    ) -> None:
        """Its request ends, in the queue or in the middle of its prompt, and gives back its memory."""
        engine.script = Script(num_outputs=0)
        with self.connection(live, self.body("Once upon a time", 100) | dict(extra)):
            assert engine.is_waiting.wait(PATIENCE_S)
        wait_until(lambda: not live.host.under_way, "the endpoint has ended")
        check_freed(engine)

    def test_a_client_that_leaves_between_two_frames(
        self, live: Live, engine: WatchedEngine, stream: Mapping[str, Any]
    ) -> None:
        """Its request ends while tokens are generated, and gives back its memory."""
        engine.script = Script(num_outputs=2)
        with self.connection(live, self.body("Once upon a time", 100) | dict(stream)) as connection:
            assert engine.is_waiting.wait(PATIENCE_S)
            assert b"200" in connection.recv(4096)
        wait_until(lambda: not live.host.under_way, "the endpoint has ended")
        check_freed(engine)

    def test_a_client_that_does_not_read_costs_no_memory(
        self, live: Live, engine: WatchedEngine, stream: Mapping[str, Any]
    ) -> None:
        """Frames are made when they can be sent: what came meanwhile is in one."""
        body = json.dumps({**self.body("Once upon a time", 64), **stream}).encode()
        sent = asyncio.run(_read_late(live.app, self.path, body, engine))
        assert sent[-1] == b""
        assert b"".join(sent).endswith(self.end_of_stream)
        assert len(sent) < 16, f"{len(sent)} frames for a client that began to read after the last token"

    def test_a_full_queue_is_a_429(self, live: Live, engine: WatchedEngine, extra: Mapping[str, Any]) -> None:
        """With the time after which to try again."""
        engine.script = Script(refusal=QueueFull("there are too many requests", retry_after_s=7))
        answer = self.ask(live, extra)
        assert answer.headers["retry-after"] == "7"
        check_error(answer, 429)

    def test_an_engine_that_dies_first_is_a_503(
        self, live: Live, engine: WatchedEngine, extra: Mapping[str, Any]
    ) -> None:
        """Before the first token there is a status to say so."""
        engine.script = Script(num_outputs=0, failure=WorkerError("the worker died"))
        check_error(self.ask(live, extra), 503)

    def test_an_engine_that_dies_ends_the_stream_with_an_error(
        self, live: Live, engine: WatchedEngine, stream: Mapping[str, Any]
    ) -> None:
        """The last event has the error, and the stream does not look complete."""
        engine.script = Script(num_outputs=2, failure=WorkerError("the worker died"))
        answer = self.ask(live, stream, num_tokens=50)
        assert answer.status_code == 200
        assert b"the worker died" in answer.content.rstrip(b"\n").rpartition(b"\n\n")[2]
        assert not answer.content.endswith(self.end_of_stream)

    def test_a_draining_server_refuses_it(self, live: Live, extra: Mapping[str, Any]) -> None:
        """An endpoint that generates text is not among the paths that stay open."""
        live.host.is_draining = True
        check_error(self.ask(live, extra), 503)

    @contextmanager
    def connection(self, live: Live, body: Mapping[str, Any]) -> Iterator[socket.socket]:
        """A connection over which a request was sent. Leaving the block closes it."""
        data = json.dumps(body).encode()
        head = f"POST {self.path} HTTP/1.1\r\nhost: suite\r\ncontent-type: application/json\r\n"
        with socket.create_connection(live.address, timeout=PATIENCE_S) as connection:
            connection.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            yield connection


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    """Data in which names were replaced by their values, at any depth."""
    if isinstance(template, Mapping):
        return {name: _filled(value, values) for name, value in template.items()}
    if isinstance(template, Sequence) and not isinstance(template, str):
        return [_filled(value, values) for value in template]
    return values.get(template, template) if isinstance(template, str) else template


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Asserts that something comes true."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.005)


def check_freed(engine: WatchedEngine) -> None:
    """Asserts that no stream is open and no KV block held, once commands to the engine were carried out."""
    wait_until(lambda: engine.num_open == 0, "every stream is closed, or read to its end")
    wait_until(lambda: asyncio.run(engine.num_used_blocks()) == 0, "no request holds a KV block")


def check_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Asserts that an answer is an error in OpenAI's shape; returns it."""
    assert answer.status_code == status, f"{answer.status_code} in place of {status}: {answer.text}"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


async def _read_late(app: Any, path: str, body: bytes, engine: WatchedEngine) -> list[bytes]:
    """Bodies that an app sends to a client that does not read until the engine has nothing left to do."""
    sent: list[bytes] = []
    has_body = True
    deadline = time.monotonic() + PATIENCE_S

    async def receive() -> Mapping[str, Any]:
        nonlocal has_body
        if not has_body:
            await asyncio.Event().wait()
        has_body = False
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            while not sent and await engine.num_used_blocks():
                assert time.monotonic() < deadline, "in vain: the engine has nothing left to do"
                await asyncio.sleep(0.005)
            sent.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers, "root_path": ""}
    await app({**scope, "http_version": "1.1", "scheme": "http", "asgi": {"version": "3.0"}}, receive, send)
    return sent


__all__ = ["GeneratingRouteSuite", "RouteSuite"]
