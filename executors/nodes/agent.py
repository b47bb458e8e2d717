"""The agent of a machine that joined: starts ranks as the driver asks, watches them, and ends them with the driver."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil

from dovetail.contracts.joining import JoinedNode
from dovetail.executors._threads import worker_threads
from dovetail.executors.nodes.inspection import Inspector
from dovetail.executors.nodes.messages import Ended, Halted, Inspect, NotStarted, Signal, Start, Started, Tick
from dovetail.executors.nodes.sockets import TICK_S, keep_alive_on


def serve_node(connection: Connection, node: JoinedNode) -> str:
    """Serves a driver until it is gone; then no rank is left. Returns why it ended. Call it in the main thread: a rank
    ends with the thread that started it."""
    agent = _Agent(connection, node)
    try:
        return agent.run()
    finally:
        agent.end_all()


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    is_halted: bool = False


class _Agent:
    def __init__(self, connection: Connection, node: JoinedNode):
        self._connection = connection
        self._node = node
        self._ranks: dict[str, _Rank] = {}
        self._inspectors: list[Inspector] = []

    def run(self) -> str:
        next_tick = 0.0
        try:
            while True:
                if self._connection.poll(max(0.0, next_tick - time.monotonic())):
                    self._handle(pickle.loads(self._connection.recv_bytes()))
                for token in list(self._ranks):
                    self._look_at(token)
                self._report_inspections()
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_S
                    self._send(Tick())
        except EOFError:
            return "it ended the connection"
        except OSError as error:
            return error.strerror or repr(error)

    def end_all(self) -> None:
        """Kills the ranks that run, and ends what looks at the machine."""
        for rank in self._ranks.values():
            rank.process.kill()
        for rank in self._ranks.values():
            rank.process.wait()
            _close_input(rank.process)
        for inspector in self._inspectors:
            inspector.end()

    def _handle(self, message: Any) -> None:
        if isinstance(message, Inspect):
            self._inspectors.append(Inspector(message))
        elif isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Signal) and message.token in self._ranks:
            self._ranks[message.token].process.send_signal(message.number)

    def _start(self, start: Start) -> None:
        keep_alive_on(self._connection, start.timeout_s)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dovetail.executors.nodes.rank"],
                env=self._environment(start),
                stdin=subprocess.PIPE,
            )
        except OSError as error:
            self._send(NotStarted(start.token, f"{sys.executable}: {error}"))
            return
        self._ranks[start.token] = _Rank(process)
        launch = {
            "driver": self._node.driver,
            "key": self._node.key.hex(),
            "token": start.token,
        }
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it ended already, which is reported
            process.stdin.write(json.dumps(launch).encode() + b"\n")
            process.stdin.flush()
        self._send(Started(start.token, process.pid))

    def _environment(self, start: Start) -> dict[str, str]:
        environment = os.environ | dict(start.environment)
        environment.setdefault("OMP_NUM_THREADS", str(worker_threads(None, start.num_ranks_here).count))
        interface = _interface_of(self._node.address)
        if interface is not None:  # by default gloo resolves the host's name, which may fail or lead elsewhere
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
            environment.setdefault("NCCL_SOCKET_IFNAME", interface)
        return environment

    def _look_at(self, token: str) -> None:
        rank = self._ranks[token]
        code = rank.process.poll()
        if code is not None:
            del self._ranks[token]
            _close_input(rank.process)
            self._send(Ended(token, code))
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            status = psutil.Process(rank.process.pid).status()
            is_halted = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            if is_halted != rank.is_halted:
                rank.is_halted = is_halted
                self._send(Halted(token, is_halted))

    def _report_inspections(self) -> None:
        for inspector in list(self._inspectors):
            answer = inspector.answer()
            if answer is not None:
                self._inspectors.remove(inspector)
                self._send(answer)

    def _send(self, message: Any) -> None:
        self._connection.send_bytes(pickle.dumps(message))


def _close_input(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def _interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == address for found in addresses):
            return name
    return None
