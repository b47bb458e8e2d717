"""Sends what was measured, in a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading

from dovetail_statsd.lines import datagrams
from dovetail_statsd.sums import Sums

logger = logging.getLogger("dovetail_statsd")


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    """(family, address) of a UDP port. Raises `OSError` for a name without an address."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    # Of "localhost", IPv6 often comes first, and StatsD listens on IPv4 unless it is told otherwise.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return found[0][0], found[0][4]


class Sender:
    """Drains `sums` every `flush_s` seconds until it is closed."""

    def __init__(
        self,
        sums: Sums,
        family: socket.AddressFamily,
        address: tuple[object, ...],
        *,
        flush_s: float,
        packet_bytes: int,
    ):
        self._sums = sums
        self._address = address
        self._flush_s = flush_s
        self._packet_bytes = packet_bytes
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._is_connected = False
        self._has_failed = False
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dovetail-statsd", daemon=True)

    def start(self) -> None:
        """Begins to send; a second call changes nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Sends the rest. Idempotent."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._is_closing.wait(self._flush_s):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        for packet in datagrams(self._sums.drain(), self._packet_bytes):
            try:
                self._send(packet)
            except OSError as error:
                if not self._has_failed:
                    logger.warning(
                        "statsd: %s does not take measurements (%s): they are lost; further losses are not logged",
                        self._address,
                        error,
                    )
                self._has_failed = True

    def _send(self, packet: bytes) -> None:
        if not self._is_connected:
            # With the next datagram, the kernel then reports that nobody listens.
            self._socket.connect(self._address)
            self._is_connected = True
        self._socket.send(packet)
