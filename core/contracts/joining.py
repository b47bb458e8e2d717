"""How machines join an executor whose workers run on several: what `python -m dovetail.worker --join` and a driver
agree on.

A machine dials the driver, and both prove that they have the same key, as `multiprocessing.connection` does: `dial`.
Then each sends one JSON object: the machine `{"role": "node", ...}` (see `JoinedNode`), the driver `{"module": NAME}`
or `{"refused": WHY}`. The module's `serve_node(connection, node)` does the rest, until the driver ends the connection.
"""

from __future__ import annotations

import os
import secrets
import socket
import stat
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Final

from dovetail.contracts.errors import ConfigError

MIN_KEY_BYTES: Final = 16
"""Bytes of the shortest key that is accepted."""
COMPARED_PACKAGES: Final = ("dovetail", "torch", "transformers", "numpy")
"""Distributions whose versions a machine reports as it joins, and which must be the driver's."""
_SENT_AGAIN_S = 0.35
"""TCP counts from when it sends something for the second time, 0.2 to 0.3 seconds after the first, and its timers are a
little late."""


@dataclass(frozen=True, kw_only=True)
class JoinedNode:
    """A machine as it joins."""

    name: str
    """Its name in messages, and in an executor's list of nodes."""
    address: str
    """IP address by which other machines reach it."""
    driver: tuple[str, int]
    """Host and port of the driver, as this machine dials it."""
    key: bytes = field(repr=False)


class ComparesMachines(ABC):
    """A `WorkerSpec` that can tell, before a weight is read, whether a machine has what its workers need. Executors
    whose workers run on other machines ask for it by `isinstance`."""

    @abstractmethod
    def machine_facts(self) -> Any:
        """Returns what is on this machine, as plain data that pickles. Called on each machine, in a process of its own.
        Does not raise for what is missing; does not import torch."""

    @abstractmethod
    def differences(self, mine: Any, theirs: Any) -> Sequence[str]:
        """Returns a sentence for each fact of another machine, `theirs`, that does not fit those of the driver, `mine`.
        It follows the machine's name and a colon."""


def read_key(path: Path) -> bytes:
    """Returns the key of a file. Raises `ConfigError` where it cannot be read, is short, or others may read it."""
    make = f"make one with: python -m dovetail.worker --new-key {path}, and copy it to every machine"
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read().strip()
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read ({error.strerror}): {make}") from error
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"the key in {path} has {len(key)} bytes, and at least {MIN_KEY_BYTES} are needed: {make}")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"others than its owner may use the key file {path}: chmod 600 {path}")
    return key


def write_key(path: Path) -> None:
    """Writes a new random key, for its owner alone. Raises `ConfigError` where the file exists or cannot be written."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    except FileExistsError as error:
        raise ConfigError(
            f"{path} exists already, and engines and machines may use the key in it: choose another path, or delete it"
        ) from error
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be written: {error.strerror}") from error


def parse_address(text: str) -> tuple[str, int]:
    """Returns host and port of "HOST:PORT" or "[HOST]:PORT". Raises `ValueError`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is no HOST:PORT such as 10.0.0.1:29400")
    return host, int(port)


def dial(address: tuple[str, int], key: bytes, *, patience_s: float) -> Connection:
    """Connects to a driver, and proves to it that this side has the key, as it does to this side. `patience_s`: as
    `set_patience` has it, until that is called for the connection again; connecting takes no longer either.

    Raises `AuthenticationError` where the keys differ, `EOFError` or `OSError` where the driver breaks off,
    `TimeoutError` where it does not answer.
    """
    end = socket.create_connection(address, timeout=patience_s)
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(end.detach())
    try:
        set_patience(connection, patience_s)
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BlockingIOError:
        connection.close()
        raise TimeoutError("it does not answer") from None
    except BaseException:
        connection.close()
        raise
    return connection


def set_patience(connection: Connection, seconds: float) -> None:
    """Makes reads and writes of a socket fail with `BlockingIOError` that take longer; 0: they may take any time."""
    interval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)


def keep_alive(end: socket.socket, timeout_s: float) -> None:
    """Makes the system end a TCP connection whose other machine does not acknowledge for `timeout_s` seconds what was
    sent. The other process need not answer: a busy one is not taken for a dead one. With nothing to send, it takes up
    to a second more."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(timeout_s)))
        seconds = max(timeout_s - _SENT_AGAIN_S, timeout_s / 2)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(seconds * 1000)))
