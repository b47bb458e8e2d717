"""`dovetail top` in a terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

BODY = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 123\n"


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(BODY)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def top(server: HTTPServer, plain_terminal: Callable[..., Any]) -> Any:
    """`dovetail top` of a server."""
    top = plain_terminal("top", f"127.0.0.1:{server.server_port}", "--interval", "0.1")
    top.wait_for("running.*123")
    return top


def test_q_ends_it(top: Any) -> None:
    top.type("q")
    assert top.end() == 0


def test_ctrl_c_ends_it(top: Any) -> None:
    top.type("\x03")
    assert top.end() == 0


def test_a_server_that_goes_away_is_said_and_the_numbers_stay(top: Any, server: HTTPServer) -> None:
    server.shutdown()
    server.server_close()
    top.wait_for("123")
    top.wait_for("no answer from")
    top.type("q")
    assert top.end() == 0


def test_an_error_is_one_line(plain_terminal: Callable[..., Any]) -> None:
    ended = plain_terminal("top", "127.0.0.1:1")
    ended.wait_for(r"error: .*no answer from http://127.0.0.1:1/metrics")
    assert ended.end() == 1
