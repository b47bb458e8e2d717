"""HTTP as clients and proxies speak it: HEAD, several requests at once on a connection, bodies that wait or come in
chunks."""

from __future__ import annotations

import re
import socket

import httpx
import pytest

from dovetail.plugins.server.live import LiveServer
from tests.plugins.server.test_server import talk


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/v1/models"])
def test_head_is_answered_as_get_without_a_body(server: LiveServer, path: str) -> None:
    whole = httpx.get(server.url + path, timeout=60)
    head, _, body = talk(server, f"HEAD {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".encode()).partition(
        b"\r\n\r\n"
    )
    assert head.startswith(b"HTTP/1.1 200")
    assert f"content-length: {len(whole.content)}".encode() in head
    assert body == b""


POST = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"


def test_pipelined_requests_are_answered_in_their_order(server: LiveServer) -> None:
    body = b'{"prompt": "Once"}'
    posted = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    got = b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n"
    last = b"GET /nowhere HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    answer = talk(server, posted + got + posted + got + last)
    marks = (b'"count"', b'"version"', b"there is no /nowhere")
    found = [mark for _, mark in sorted((match.start(), mark) for mark in marks for match in re.finditer(mark, answer))]
    assert found == [marks[0], marks[1], marks[0], marks[1], marks[2]]
    assert answer.count(b"HTTP/1.1 200") == 4


def test_a_client_that_expects_100_sends_its_body_then(server: LiveServer) -> None:
    body = b'{"prompt": "Once"}'
    with socket.create_connection(server.address, timeout=30) as connection:
        head = b"expect: 100-continue\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection.sendall(POST + head)
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert b'"count"' in b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_client_that_expects_100_may_be_refused_at_once(server: LiveServer) -> None:
    head = b"expect: 100-continue\r\ncontent-length: 1000000000\r\n\r\n"
    answer = talk(server, POST + head)
    assert answer.startswith(b"HTTP/1.1 413")


def test_trailers_of_a_chunked_body_are_read_over(server: LiveServer) -> None:
    chunked = POST + b"transfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n"
    chunks = b'9;a=b\r\n{"prompt"\r\n9\r\n: "Once"}\r\n0\r\nx-sum: 1\r\nx-request-id: \xff\r\n\r\n'
    last = b"GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    answer = talk(server, chunked + chunks + last)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.index(b'"count"') < answer.index(b'"version"')


def test_endless_trailers_end_the_connection(server: LiveServer) -> None:
    with socket.create_connection(server.address, timeout=30) as connection:
        connection.sendall(POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-a: ")
        with pytest.raises(ConnectionError):
            connection.sendall(b"a" * 2**26)
