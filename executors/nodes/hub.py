"""Where machines and their ranks dial in."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from dovetail.contracts.errors import PluginError, WorkerError
from dovetail.executors.nodes.greetings import Greetings
from dovetail.executors.nodes.links import NodeLink
from dovetail.executors.nodes.sockets import keep_alive_on, send_at_once

_log = logging.getLogger(__name__)

AGENT = "dovetail.executors.nodes.agent"
"""What serves this hub on a machine that joined."""
_CHECK_S = 0.1
_QUIET_S = 10.0
"""Seconds of waiting for machines after which a line says so."""
_JOIN_S = 1.0
"""Seconds to wait for the thread that accepts: a finalizer that closes the hub may run in one that it waits for."""
_MAX_REFUSALS = 16
"""Callers whose refusals are kept, the last ones."""


class Hub:
    """Listens, and knows the machines that joined. `names`: those that may; None: any, up to `count`. `advice`: what to
    do where machines are missing; "{port}" in it becomes the port. `word_on`: what a cluster manager says on a node
    that is gone; see `NodeLink`."""

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        timeout_s: float,
        count: int,
        names: Sequence[str] | None,
        advice: str,
        *,
        word_on: Callable[[str], str] | None = None,
    ):
        self._timeout_s = timeout_s
        self._count = count
        self._names = names
        self._word_on = word_on
        self._owner_pid = os.getpid()
        self._nodes: dict[str, NodeLink] = {}
        self._ranks: dict[str, queue.SimpleQueue[Connection]] = {}
        self._changed = threading.Condition()
        self._refusals: dict[str, str] = {}
        self._greetings = Greetings(key, self._admit, self._refuse)
        self._is_closing = False
        self._listener = _listen(address)
        self.port: int = self._listener.getsockname()[1]
        self._advice = advice.replace("{port}", str(self.port))
        self._listener.settimeout(_CHECK_S)
        self._thread = threading.Thread(target=self._accept, name="dovetail-join", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> list[NodeLink]:
        """Returns the machines once enough have joined, in the order of the names asked for, or of their own. Raises
        `WorkerError` that says which are missing."""
        began, is_quiet = time.monotonic(), True
        with self._changed:
            while not self._is_complete():
                waited = time.monotonic() - began
                if waited >= timeout_s:
                    raise WorkerError(f"{self._what_is_missing(f'joined in {timeout_s:g} s')}. {self._advice}")
                if is_quiet and waited >= _QUIET_S:
                    is_quiet = False
                    missing = self._what_is_missing("have joined")
                    _log.warning("waiting up to %g s for nodes: %s. %s", timeout_s, missing, self._advice)
                self._changed.wait(_CHECK_S)
            return [self._nodes[name] for name in self._names or sorted(self._nodes)]

    def connection_of(self, token: str, timeout_s: float) -> Connection:
        """Returns the connection of the rank that dials with the token. Raises `TimeoutError`."""
        with self._changed:
            waiting = self._ranks.setdefault(token, queue.SimpleQueue())
        try:
            return waiting.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError("it did not dial the engine in time") from None

    def close(self) -> None:
        """Lets all machines go. Idempotent; does nothing in a process that was forked off the owner's."""
        if os.getpid() != self._owner_pid:
            return
        self._is_closing = True
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        self._listener.close()
        self._greetings.close()
        with self._changed:  # what a greeting admits from now on is turned away
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()
        for waiting in self._ranks.values():
            with contextlib.suppress(queue.Empty):
                waiting.get_nowait().close()

    def _is_complete(self) -> bool:
        for name in [name for name, node in self._nodes.items() if node.lost]:
            self._nodes.pop(name).close()
        return len(self._nodes) == self._count

    def _what_is_missing(self, joined_how: str) -> str:
        joined = ", ".join(sorted(self._nodes)) or "none"
        missing = [name for name in self._names or () if name not in self._nodes]
        which = f"; missing: {', '.join(missing)}" if missing else ""
        refused = "; ".join(f"{caller}: {why}" for caller, why in self._refusals.items())
        problem = f". Refused were {refused}" if refused else ""
        return f"{len(self._nodes)} of {self._count} nodes {joined_how} (joined: {joined}{which}){problem}"

    # The thread that accepts

    def _accept(self) -> None:
        while not self._is_closing:
            self._greetings.end_overdue()
            try:
                end, peer = self._listener.accept()
            except OSError:  # nobody called (TimeoutError), or the caller hung up already
                continue
            try:
                self._greetings.begin(end, peer[0])
            except (OSError, RuntimeError) as error:  # no descriptor or no thread is left
                _log.warning("a caller at %s was turned away: %r", peer[0], error)
                end.close()

    # The threads that greet

    def _refuse(self, caller: str, why: str) -> None:
        with self._changed:
            self._refusals.pop(caller, None)
            self._refusals[caller] = why
            while len(self._refusals) > _MAX_REFUSALS:
                del self._refusals[next(iter(self._refusals))]

    def _admit(self, hello: Mapping[str, Any], connection: Connection, address: str) -> None:
        with self._changed:
            if self._is_closing:
                connection.close()
                return
            if hello["role"] == "rank":
                send_at_once(connection)
                self._ranks.setdefault(hello["token"], queue.SimpleQueue()).put(connection)
                return
            caller = f"node {hello['name']} ({address})"
            refusal = self._why_not(hello["name"])
            if refusal:
                self._refuse(caller, refusal)
                connection.send_bytes(json.dumps({"refused": refusal}).encode())
                connection.close()
                return
            keep_alive_on(connection, self._timeout_s)
            connection.send_bytes(json.dumps({"module": AGENT}).encode())
            self._refusals.pop(caller, None)
            self._nodes[hello["name"]] = NodeLink(hello, connection, self._timeout_s, self._word_on)
            self._changed.notify_all()

    def _why_not(self, name: str) -> str:
        known = self._nodes.get(name)
        if known is not None and known.lost is None:
            return f"a node named {name} has joined already: give each its own --name"
        if self._names is not None and name not in self._names:
            return f"executor.nodes does not name {name}, but {', '.join(self._names)}"
        if known is None and len(self._nodes) >= self._count:
            return f"it has the {self._count} nodes that it needs"
        return ""


def _listen(address: tuple[str, int]) -> socket.socket:
    host, port = address
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} is taken by another process: end it, or choose another port"
        else:
            why = f"cannot listen at {host}:{port} ({error.strerror or error}): name an address of this machine"
        raise PluginError(why) from error
