"""The thread that publishes batches over ZeroMQ, and sends those again that a subscriber missed."""

from __future__ import annotations

import logging
import threading
from collections import deque

import msgspec
import zmq

from dovetail.contracts.errors import ConfigError
from dovetail.plugins.telemetry.kv_events.wire import Batch

logger = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
"""In place of a sequence number: no more batches are sent again."""
_CLOSE_S = 1.0
"""How long `close` waits until what was published is sent."""


class Publisher:
    """Publishes from a thread of its own. `publish` does not wait."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, topic: str, buffer_steps: int, hwm: int, max_queue_size: int
    ):
        """Raises `ConfigError` for an endpoint that cannot be bound or connected to."""
        self._topic = topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        """Sequence number and payload of the last batches."""
        self._queue: deque[Batch] = deque()
        self._max_queue_size = max_queue_size
        self._sequence = 0
        self._is_closed = False
        self._encode = msgspec.msgpack.Encoder().encode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake_address = f"inproc://wake-{id(self)}"
        try:
            self._pub = self._open(zmq.PUB, "endpoint", endpoint, hwm)
            self._replay = (
                self._open(zmq.ROUTER, "replay_endpoint", replay_endpoint, hwm) if replay_endpoint is not None else None
            )
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._woken = self._context.socket(zmq.PAIR)
        self._woken.bind(self._wake_address)
        self._waker = self._context.socket(zmq.PAIR)
        self._waker.connect(self._wake_address)
        self._thread = threading.Thread(target=self._run, name="dovetail-kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: Batch) -> None:
        """Queues a batch. Where `max_queue_size` wait, the oldest is lost: its sequence number is missing."""
        if self._is_closed:
            return
        if len(self._queue) >= self._max_queue_size:
            self._queue.popleft()
            self._sequence += 1
        self._queue.append(batch)
        self._waker.send(b"")

    def close(self) -> None:
        """Sends what is queued and ends. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._waker.send(b"")
        self._thread.join(_CLOSE_S)
        self._waker.close(linger=0)
        self._context.destroy(linger=int(_CLOSE_S * 1000))

    def _open(self, kind: int, option: str, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        """Binds where vLLM does: to any interface, to a path, and to what subscribers ask."""
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        is_local = endpoint.startswith(("ipc://", "inproc://"))
        try:
            if option == "replay_endpoint" or is_local or "*" in endpoint or "::" in endpoint:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"telemetry sink kv_events cannot use {option} {endpoint!r} ({error}): give another, as in"
                " tcp://*:5557 or ipc:///path"
            ) from error
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                if socket is self._woken:
                    self._woken.recv()
                    self._send_queued()
                elif self._replay is not None:
                    self._send_again(self._replay)
            if self._is_closed and not self._queue:
                break
        self._woken.close(linger=0)
        self._pub.close()
        if self._replay is not None:
            self._replay.close()

    def _send_queued(self) -> None:
        while self._queue:
            batch = self._queue.popleft()
            number, self._sequence = self._sequence.to_bytes(8, "big"), self._sequence + 1
            payload = self._encode(batch)
            self._kept.append((number, payload))
            self._pub.send_multipart((self._topic, number, payload))

    def _send_again(self, replay: zmq.Socket[bytes]) -> None:
        """A subscriber asks for all from a sequence number on."""
        parts = replay.recv_multipart()
        if len(parts) != 3 or len(parts[2]) != 8:
            logger.warning("a subscriber of KV events asked for a replay with %d parts, not 3", len(parts))
            return
        client, _, first = parts
        for number, payload in self._kept:
            if number >= first:
                replay.send_multipart((client, b"", number, payload))
        replay.send_multipart((client, b"", _END, b""))
