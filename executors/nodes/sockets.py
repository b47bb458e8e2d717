"""Sockets of connections between the driver and other machines."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection

from dovetail.contracts.joining import keep_alive

TICK_S = 0.1
"""Seconds between messages of agents and their driver, so that there is something to acknowledge."""


def keep_alive_on(connection: Connection, timeout_s: float) -> None:
    """`keep_alive` of a connection's socket: an other machine that is gone is noticed within `timeout_s`, the time
    until the next tick included."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        keep_alive(end, max(timeout_s - TICK_S, timeout_s / 2))


def send_at_once(connection: Connection) -> None:
    """For a rank's connection, which has no timeout: a rank that is busy or halted reads nothing, and once what was
    sent to it fills the buffers, TCP would take it for dead. Its agent's connection says whether the machine is."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
