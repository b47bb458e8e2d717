"""The driver's side of one machine: a connection to its agent, and a handle on each of its ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from dovetail.contracts.errors import WorkerError
from dovetail.executors.nodes.messages import (
    Ended,
    Halted,
    Inspect,
    Inspection,
    NotStarted,
    Signal,
    Start,
    Started,
    Tick,
)
from dovetail.executors.nodes.sockets import TICK_S
from dovetail.executors.processes import WorkerProcess

_CHECK_S = 0.1


class NodeLink:
    """One machine that joined. A thread reads what its agent says, and notices when it is gone. It then asks `word_on`
    with the machine's name for a clause on how that came, which must take less than a second."""

    def __init__(
        self,
        hello: Mapping[str, Any],
        connection: Connection,
        timeout_s: float,
        word_on: Callable[[str], str] | None = None,
    ):
        self.name: str = hello["name"]
        self.address: str = hello["address"]
        self.versions: Mapping[str, str] = hello["versions"]
        self._connection = connection
        self._timeout_s = timeout_s
        self._word_on = word_on
        self._send_lock = threading.Lock()
        self._ranks: dict[str, NodeProcess] = {}
        self._inspections: queue.SimpleQueue[Inspection] = queue.SimpleQueue()
        self._is_closing = False
        self._lost: str | None = None
        self._reader = threading.Thread(target=self._read, name=f"dovetail-node-{self.name}", daemon=True)
        self._reader.start()

    @property
    def lost(self) -> str | None:
        """Why the machine counts as gone; None while it does not."""
        return self._lost

    def inspect(self, question: Inspect, timeout_s: float) -> Inspection:
        """Returns what is on the machine. Raises `WorkerError` where it does not answer."""
        self.send(question)
        deadline = time.monotonic() + timeout_s
        while self._lost is None and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                return self._inspections.get(timeout=_CHECK_S)
        raise WorkerError(f"node {self.name} did not say what it has: {self._lost or f'no answer for {timeout_s:g} s'}")

    def start(
        self,
        rank: int,
        environment: Mapping[str, str],
        num_ranks_here: int,
        connect: Callable[[str, float], Connection],
    ) -> NodeProcess:
        """Starts the process of a rank. `connect`: waits for the connection of a token."""
        process = NodeProcess(self, secrets.token_hex(16), connect)
        self._ranks[process.token] = process
        self.send(Start(process.token, rank, dict(environment), num_ranks_here, self._timeout_s))
        if self._lost is not None:  # the reader has ended, and may not have seen this rank
            process.note_lost()
        return process

    def send(self, message: Any) -> None:
        """Sends a message; a machine that is gone gets none."""
        with contextlib.suppress(OSError), self._send_lock:
            self._connection.send_bytes(pickle.dumps(message))

    def close(self) -> None:
        """Ends the connection: the agent then ends its ranks. Idempotent."""
        self._is_closing = True
        if self._reader is not threading.current_thread():
            self._reader.join()
        with self._send_lock:
            self._connection.close()

    def _read(self) -> None:
        why = "the engine ended the connection"
        next_tick = 0.0
        try:
            while not self._is_closing:
                if self._connection.poll(max(0.0, next_tick - time.monotonic())):
                    self._handle(pickle.loads(self._connection.recv_bytes()))
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_S
                    with self._send_lock:
                        self._connection.send_bytes(pickle.dumps(Tick()))
        except EOFError:
            why = "its agent ended"
        except ConnectionResetError:
            why = "its agent ended"
        except OSError as error:
            why = f"it acknowledges nothing for {self._timeout_s:g} s ({error.strerror}; executor.node_timeout_s)"
        except Exception as error:  # ranks must not be waited for, whatever goes wrong here
            why = f"what its agent said cannot be read: {error!r}"
        if self._word_on is not None and not self._is_closing:
            for process in list(self._ranks.values()):
                process.cut()  # the engine stops now, and only its error waits for the word
            why = f"{why}; {self._word_on(self.name)}"
        self._lost = f"node {self.name} ({self.address}) is gone: {why}"
        for process in list(self._ranks.values()):
            process.note_lost()

    def _handle(self, message: Any) -> None:
        if isinstance(message, Inspection):
            self._inspections.put(message)
        elif isinstance(message, Started):
            self._ranks[message.token].pid = message.pid
        elif isinstance(message, NotStarted):
            self._ranks[message.token].note_not_started(message.why)
        elif isinstance(message, Halted):
            self._ranks[message.token].is_halted = message.is_halted
        elif isinstance(message, Ended):
            self._ranks[message.token].note_end(message.code)


class NodeProcess(WorkerProcess):
    """The process of one rank on a machine that joined."""

    def __init__(self, link: NodeLink, token: str, connect: Callable[[str, float], Connection]):
        self.token = token
        self.pid: int | None = None
        self.is_halted = False
        self._link = link
        self._wait_for = connect
        self._code: int | None = None
        self._why_not_started = ""
        self._is_over = threading.Event()
        self._end: socket.socket | None = None

    @property
    def local_pid(self) -> int | None:
        """None: even where the agent is on this machine, it need not see the same folders."""
        return None

    @property
    def label(self) -> str:
        """The machine, and the process id there."""
        return f"node {self._link.name}" if self.pid is None else f"node {self._link.name}, pid {self.pid}"

    @property
    def node(self) -> str:
        """The machine's name."""
        return f"node {self._link.name}"

    def connect(self, timeout_s: float) -> Connection:
        """Waits until the process has dialled."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                connection = self._wait_for(self.token, _CHECK_S)
                break
            except TimeoutError:
                if self._is_over.is_set():
                    raise ConnectionError(self.lost() or "it ended before it dialled") from None
                if time.monotonic() >= deadline:
                    raise
        self._end = socket.socket(fileno=os.dup(connection.fileno()))
        if self._is_over.is_set():
            self.cut()
        return connection

    def exit_code(self) -> int | None:
        """As the agent reported it."""
        return self._code

    def lost(self) -> str | None:
        """Why the machine is gone or started no process, where the exit code is not known."""
        if self._why_not_started:
            return f"could not be started: {self._why_not_started}"
        is_lost = self._code is None and self._is_over.is_set()
        return f"was lost: {self._link.lost}" if is_lost else None

    def wait(self, seconds: float) -> None:
        """Returns as well when the machine is gone."""
        self._is_over.wait(seconds)

    def terminate(self) -> None:
        """Has the agent send SIGTERM."""
        self._link.send(Signal(self.token, signal.SIGTERM))

    def kill(self) -> None:
        """Has the agent send SIGKILL."""
        self._link.send(Signal(self.token, signal.SIGKILL))

    def is_stopped(self) -> bool:
        """As the agent saw it last."""
        return self.is_halted

    def close(self) -> None:
        """Closes this handle's descriptor of the connection."""
        end, self._end = self._end, None
        if end is not None:
            end.close()

    def note_end(self, code: int) -> None:
        """The agent reported the end."""
        self._code = code
        self._is_over.set()

    def note_not_started(self, why: str) -> None:
        """The agent could not start the process."""
        self._why_not_started = why
        self._is_over.set()

    def note_lost(self) -> None:
        """The machine is gone, and `NodeLink.lost` says why: nobody waits for the process any more."""
        self._is_over.set()
        self.cut()

    def cut(self) -> None:
        """What reads the connection finds its end."""
        end = self._end
        if end is not None:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
