"""Clients on raw sockets, which cost next to nothing themselves: streams, whole responses, probes."""

from __future__ import annotations

import json
import multiprocessing
import re
import selectors
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

_READ = 1 << 18
_FRAME = b"data: "
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


def request(num_tokens: int, *, stream: bool = True, prompt: str = "hello") -> bytes:
    """A request of /v1/completions as it goes over the wire."""
    body = json.dumps(
        {"model": "null", "prompt": prompt, "max_tokens": num_tokens, "stream": stream, "ignore_eos": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@dataclass
class Reading:
    """What was read of one stream."""

    sent_at: float = 0.0
    num_frames: int = 0
    """Without [DONE]."""
    arrivals: list[float] | None = None
    """Of frames; None: not kept."""
    tail: bytes = field(default=b"", repr=False)

    @property
    def first_ms(self) -> float:
        """Milliseconds from the request to the first frame."""
        assert self.arrivals
        return 1e3 * (self.arrivals[0] - self.sent_at)


def read_streams(port: int, num: int, num_tokens: int, *, keep_arrivals: bool = False) -> tuple[float, list[Reading]]:
    """Seconds until `num` streams, which start at once, have ended; and what came."""
    with selectors.DefaultSelector() as selector:
        readings = []
        connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(num)]
        wire = request(num_tokens)
        started = time.perf_counter()
        for connection in connections:
            readings.append(Reading(time.perf_counter(), arrivals=[] if keep_arrivals else None))
            connection.sendall(wire)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, readings[-1])
        while selector.get_map():
            for key, _ in selector.select():
                if not _read_frames(key.fileobj, key.data):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
        return time.perf_counter() - started, readings


def _read_frames(connection: socket.socket, reading: Reading) -> bool:
    """Whether the stream goes on."""
    data = connection.recv(_READ)
    if not data:
        raise SystemExit(f"a stream broke off after {reading.num_frames} frames: {reading.tail!r}")
    recent = reading.tail + data
    # What begins in the tail and ends in the new data was not counted yet.
    count = recent.count(_FRAME) - reading.tail.count(_FRAME)
    is_done = b"data: [DONE]" in recent
    reading.num_frames += count - is_done
    if reading.arrivals is not None:
        reading.arrivals += [time.perf_counter()] * (count - is_done)
    reading.tail = recent[-32:]
    return not is_done


def count_responses(port: int, num_connections: int, num_tokens: int, seconds: float) -> int:
    """Whole responses that arrive within `seconds`, each connection sending the next request after a response."""
    wire = request(num_tokens, stream=False)
    count = 0
    with selectors.DefaultSelector() as selector:
        for _ in range(num_connections):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(wire)
            selector.register(connection, selectors.EVENT_READ, bytearray())
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            for key, _ in selector.select(0.1):
                key.data.extend(key.fileobj.recv(_READ))  # type: ignore[union-attr]
                if _is_whole(key.data):
                    key.data.clear()
                    count += 1
                    key.fileobj.sendall(wire)  # type: ignore[union-attr]
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return count


def _is_whole(response: bytes) -> bool:
    """Whether all of a response is there. Raises for one that is no success."""
    head, separator, body = response.partition(b"\r\n\r\n")
    length = _LENGTH.search(head + b"\r\n")
    if not separator or length is None:
        return False
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(bytes(response).decode(errors="replace"))
    return len(body) >= int(length[1])


Ask = Callable[[int], None]
"""One request of a kind to the server at a port, read to its end."""


def ask_long(port: int) -> None:
    """One token after a prompt of 100,000."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request(1, stream=False, prompt="x" * 100_000))
        response = bytearray()
        while not _is_whole(response):
            response += connection.recv(_READ)


def ask_first_token(port: int) -> None:
    """A stream of two tokens, up to its first frame."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request(2))
        reading = Reading()
        while not reading.num_frames:
            _read_frames(connection, reading)


def ask_metrics(port: int) -> None:
    """/metrics, over a connection of its own."""
    urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read()


def ask_health(port: int) -> None:
    """/health, over a connection of its own."""
    urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read()


@contextmanager
def asking(ask: Ask, port: int, pause_s: float) -> Iterator[list[float]]:
    """Asks again and again meanwhile, from a process of its own. The seconds that each took are in the list at the
    end."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()
    process = context.Process(target=_ask_until_told, args=(ask, port, pause_s, sender))
    process.start()
    times: list[float] = []
    try:
        yield times
    finally:
        receiver.send(None)
        times += receiver.recv()
        process.join()


def _ask_until_told(ask: Ask, port: int, pause_s: float, told: Connection) -> None:
    times = []
    while not told.poll(pause_s):
        started = time.perf_counter()
        ask(port)
        times.append(time.perf_counter() - started)
    told.send(times)
