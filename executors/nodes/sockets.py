"""Sockets of connections between the driver and other machines."""

from __future__ import annotations

import os
import socket
import struct
from multiprocessing.connection import Connection

from dovetail.contracts.joining import keep_alive


def keep_alive_on(connection: Connection, timeout_s: float) -> None:
    """`keep_alive` of a connection's socket."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        keep_alive(end, timeout_s)


def set_patience(connection: Connection, seconds: float) -> None:
    """Makes reads and writes that take longer fail with `BlockingIOError`; 0: they may take any time."""
    interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
