"""An executor of processes as others write one, on `dovetail.executors.processes` alone.

Each worker dials the driver, over TCP with a key, as it would from another machine; ranks meet through a TCP store, not
a file. Ranks are counted from the last share of the layers to the first, so that the rank that answers is not rank 0.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import ClassVar

from dovetail.contracts.executor import ExecutorCapabilities, Placement, WorkerLayout
from dovetail.executors.processes import ChildProcess, ProcessExecutor

WORKER = """\
import os
from multiprocessing.connection import Client
from dovetail.executors.processes import serve
key = bytes.fromhex(os.environ.pop("DRIVER_KEY"))
serve(Client(("127.0.0.1", int(os.environ["DRIVER_PORT"])), authkey=key))
"""


class DiallingProcess(ChildProcess):
    """A process that dials the port of its own that the driver listens on."""

    def __init__(self, environment: Mapping[str, str]):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._key = secrets.token_bytes(32)
        address = {"DRIVER_PORT": str(self._listener.getsockname()[1]), "DRIVER_KEY": self._key.hex()}
        super().__init__(subprocess.Popen([sys.executable, "-c", WORKER], env=os.environ | environment | address))

    def connect(self, timeout_s: float) -> Connection:
        """Waits for the call, and has the caller show the key."""
        with self._listener:
            caller = self._accept(time.monotonic() + timeout_s)
        caller.setblocking(True)
        connection = Connection(caller.detach())
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
        except AuthenticationError as error:
            connection.close()
            raise ConnectionRefusedError(str(error)) from error
        return connection

    def close(self) -> None:
        """Hangs up, if nobody has dialled."""
        self._listener.close()

    def _accept(self, deadline: float) -> socket.socket:
        self._listener.settimeout(0.2)
        while True:
            try:
                return self._listener.accept()[0]
            except TimeoutError:
                if self.exit_code() is not None or time.monotonic() > deadline:
                    raise


class DiallingExecutor(ProcessExecutor):
    """Starts workers that dial."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities: ClassVar[ExecutorCapabilities] = ExecutorCapabilities(
        device_types=frozenset({"cpu"}), tensor_parallel=None, enforce_eager=True
    )

    def placements(self, scratch: Path) -> list[Placement]:
        """Backwards, on as many nodes as there are ranks, for all that the layout knows."""
        size = self.need.tensor_parallel
        backwards = tuple(reversed(range(size)))
        layout = WorkerLayout(tensor_parallel=size, positions=backwards, nodes=tuple(range(size)))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        return layout.placements(["cpu"] * size, init_method=f"tcp://127.0.0.1:{port}" if size > 1 else None)

    def launch(self, placement: Placement, environment: Mapping[str, str], scratch: Path) -> DiallingProcess:
        """A child, which could be `ssh`."""
        return DiallingProcess(environment)


class ElsewhereProcess(DiallingProcess):
    """As if it ran on another machine: nobody can signal it, nor read its files."""

    local_pid = None


class ElsewhereExecutor(DiallingExecutor):
    """Its workers might be anywhere."""

    def launch(self, placement: Placement, environment: Mapping[str, str], scratch: Path) -> ElsewhereProcess:
        """A child, of which nobody knows."""
        return ElsewhereProcess(environment)


class NobodyDials(DiallingExecutor):
    """Its workers end before they dial."""

    def launch(self, placement: Placement, environment: Mapping[str, str], scratch: Path) -> DiallingProcess:
        """One that is killed at once."""
        process = DiallingProcess(environment)
        process.kill()
        return process
