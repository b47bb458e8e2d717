"""The thread of an engine's process that listens to clients. It answers at once what needs no step, and hands the rest
to the step loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from dovetail.contracts.engine_client import RequestReports
from dovetail.engine.remote.messages import (
    Abort,
    Ask,
    Call,
    Explain,
    Explained,
    Hello,
    Reply,
    Stop,
    Submit,
    Welcome,
    decode_to_engine,
    encode,
    failure_of,
)
from dovetail.engine.remote.outbox import Outbox

logger = logging.getLogger(__name__)

_WAKE = "inproc://dovetail-replies"
_LINGER_MS = 500
"""So long the process stays for clients that have not read its last messages, such as why it ends."""


class Receiver(Protocol):
    """What the thread hands on, in the order in which it comes. A client is named by the identity of its socket."""

    def client_came(self, client: bytes, outbox: Outbox) -> None:
        """A client is there; its updates go into `outbox`, which is the receiver's from now on."""

    def client_said(self, client: bytes, message: Submit | Stop | Abort | Call) -> None:
        """A message of a client."""

    def client_went(self, client: bytes) -> None:
        """The process of a client is gone, or has closed its socket."""


class IOThread:
    """Owns the ROUTER socket."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        welcome: Welcome,
        answers: Mapping[str, Callable[[], Any]],
        explain: Callable[[str], RequestReports],
        receiver: Receiver,
    ):
        """`answers`, `explain`: what is called for an `Ask` and an `Explain`, in this thread, while a step runs."""
        self._context = context
        self._welcome = encode(welcome)
        self._answers = answers
        self._explain = explain
        self._receiver = receiver
        self._monitors: dict[zmq.Socket[bytes], bytes] = {}
        """What reports that the connection to a client is lost -> the client."""
        self._poller = zmq.Poller()
        self._router = context.socket(zmq.ROUTER)
        self._router.set(zmq.LINGER, 0)
        self._router.set(zmq.SNDHWM, 0)
        self._router.bind(address)
        self._replies = context.socket(zmq.PULL)
        self._replies.bind(_WAKE)
        self._thread = threading.Thread(target=self._run, name="dovetail-engine-io", daemon=True)

    def start(self) -> None:
        """Begins to listen."""
        self._thread.start()

    def reply_socket(self) -> zmq.Socket[bytes]:
        """A socket for another thread: [client, message] goes to that client, one part alone ends the thread."""
        socket = self._context.socket(zmq.PUSH)
        socket.connect(_WAKE)
        return socket

    def join(self) -> None:
        """Waits for the end of the thread."""
        self._thread.join()

    def _run(self) -> None:
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._replies, zmq.POLLIN)
        try:
            while self._turn():
                pass
        finally:
            for monitor in self._monitors:
                monitor.close()
            self._router.close(_LINGER_MS)
            self._replies.close()

    def _turn(self) -> bool:
        """Waits, and deals with what came; False when it is time to end."""
        for socket, _ in self._poller.poll():
            if socket is self._replies:
                parts = self._replies.recv_multipart()
                if len(parts) == 1:
                    return False
                self._router.send_multipart(parts)
            elif socket is self._router:
                client, *messages = self._router.recv_multipart()
                for message in messages:
                    self._take(client, message)
            else:
                self._look_at(socket)
        return True

    def _take(self, client: bytes, data: bytes) -> None:
        try:
            message = decode_to_engine(data)
        except msgspec.DecodeError:
            logger.exception("a client sent what is no message")
            return
        if isinstance(message, Ask):
            self._router.send_multipart([client, encode(self._answer(message))])
        elif isinstance(message, Explain):
            self._router.send_multipart([client, encode(self._explained(message))])
        elif isinstance(message, Hello):
            outbox = Outbox(self._context, message.address)
            monitor = outbox.monitor()
            self._monitors[monitor] = client
            self._poller.register(monitor, zmq.POLLIN)
            self._receiver.client_came(client, outbox)
            self._router.send_multipart([client, self._welcome])
        else:
            self._receiver.client_said(client, message)

    def _look_at(self, monitor: zmq.Socket[bytes]) -> None:
        event = recv_monitor_message(monitor)
        if event["event"] == zmq.EVENT_DISCONNECTED:
            self._poller.unregister(monitor)
            self._receiver.client_went(self._monitors.pop(monitor))

    def _answer(self, message: Ask) -> Reply:
        try:
            return Reply(message.call_id, self._answers[message.name](), None)
        except Exception as error:
            return Reply(message.call_id, None, failure_of(error))

    def _explained(self, message: Explain) -> Explained:
        try:
            return Explained(message.call_id, self._explain(message.request_id), None)
        except Exception as error:
            return Explained(message.call_id, None, failure_of(error))
