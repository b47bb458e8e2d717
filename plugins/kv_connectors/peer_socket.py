"""How one engine fetches records from another: a question of 72 bytes, an answer with its length before it.

question: "DKV1", namespace (32 bytes), block hash (32 bytes), 4 bytes that are 0
answer:   length (8 bytes, little endian), and so many bytes; length 0: not there
"""

from __future__ import annotations

import socket
import socketserver
import struct
import threading

from dovetail.plugins.kv_connectors.recent_records import RecentRecords

_QUESTION = struct.Struct("<4s32s32s4x")
_LENGTH = struct.Struct("<Q")
_MAGIC = b"DKV1"


class PeerConnection:
    """A connection to one rank of another engine."""

    def __init__(self, address: tuple[str, int], timeout_s: float):
        """Raises `OSError`. `timeout_s`: of connecting, and of each part of an answer."""
        self._socket = socket.create_connection(address, timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fetch(self, namespace: bytes, block_hash: bytes, num_bytes: int) -> bytearray | None:
        """A record of so many bytes, or None where the peer has none. Raises `OSError` where it does not answer, or
        with another length, and of these `ConnectionError` where the connection is closed: it cannot be used any
        more."""
        self._socket.sendall(_QUESTION.pack(_MAGIC, namespace, block_hash))
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
        if length == 0:
            return None
        if length != num_bytes:
            raise OSError(f"the peer answers with {length} bytes for a record of {num_bytes}")
        return self._receive(length)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _receive(self, num_bytes: int) -> bytearray:
        received = bytearray(num_bytes)
        view, done = memoryview(received), 0
        while done < num_bytes:
            count = self._socket.recv_into(view[done:])
            if not count:
                raise ConnectionError("the peer closed the connection")
            done += count
        return received


class _Answers(socketserver.BaseRequestHandler):
    """One connection of a consumer, in a thread of its own."""

    server: _Server

    def handle(self) -> None:
        """Answers until the other side closes, or says what is no question."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while (question := self._question()) is not None:
            namespace, block_hash = question
            record = self.server.find(namespace, block_hash)
            try:
                self.request.sendall(_LENGTH.pack(len(record) if record is not None else 0))
                if record is not None:
                    self.request.sendall(record)
            except OSError:
                return

    def _question(self) -> tuple[bytes, bytes] | None:
        received = b""
        while len(received) < _QUESTION.size:
            try:
                part = self.request.recv(_QUESTION.size - len(received))
            except OSError:
                return None
            if not part:
                return None
            received += part
        magic, namespace, block_hash = _QUESTION.unpack(received)
        return (namespace, block_hash) if magic == _MAGIC else None


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], namespace: bytes, records: RecentRecords, wait_s: float):
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Answers)
        self.is_over = False
        self.open: set[socket.socket] = set()
        self._namespace = namespace
        self._records = records
        self._wait_s = wait_s

    def find(self, namespace: bytes, block_hash: bytes) -> bytes | None:
        """A record of an engine with the same pages, once it is there."""
        if namespace != self._namespace or self.is_over:
            return None
        return self._records.wait_for(block_hash, self._wait_s, lambda: self.is_over)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if isinstance(request, socket.socket):
            self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        if isinstance(request, socket.socket):
            self.open.discard(request)
        super().shutdown_request(request)


class RecordServer:
    """Lets other engines read the records of one rank."""

    def __init__(self, address: tuple[str, int], namespace: bytes, records: RecentRecords, wait_s: float):
        """Listens from now on. Raises `OSError`."""
        self._records = records
        self._server = _Server(address, namespace, records, wait_s)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="dovetail-kv-peer", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Closes all connections. Idempotent."""
        if self._server.is_over:
            return
        self._server.is_over = True
        self._records.wake()
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._server.open):
            connection.close()
        self._thread.join()
