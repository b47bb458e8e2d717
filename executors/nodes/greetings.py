"""Greets callers, each in a thread of its own, so that one that is slow or hostile keeps nobody waiting."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

_DEADLINE_S = 5.0
"""Seconds from the call to the end of the greeting, however many reads that takes."""
_MAX_GREETINGS = 64
"""Greetings at a time; more than ranks dial at once."""
_MAX_HELLO_BYTES = 1 << 16


@dataclass(eq=False, frozen=True)
class _Caller:
    end: socket.socket
    """A descriptor of its own, so that it can be shut down whatever the thread does with the connection."""
    address: str
    deadline: float


class Greetings:
    """Those that go on. `admit` gets the hello and the connection of a caller that has the key, and the caller's
    address; `refuse` gets the address of one that was not greeted, and why. Both are called by the caller's thread."""

    def __init__(
        self,
        key: bytes,
        admit: Callable[[Mapping[str, Any], Connection, str], None],
        refuse: Callable[[str, str], None],
    ):
        self._key = key
        self._admit = admit
        self._refuse = refuse
        self._lock = threading.RLock()  # a finalizer may close a hub in any thread
        self._open: list[_Caller] = []

    def begin(self, end: socket.socket, address: str) -> None:
        """Greets a caller in a thread. Where as many are greeted as may be, the oldest of the address that has most of
        them is ended: a caller at another address is not kept out."""
        end.setblocking(True)
        caller = _Caller(socket.socket(fileno=os.dup(end.fileno())), address, time.monotonic() + _DEADLINE_S)
        connection = Connection(end.detach())
        thread = threading.Thread(target=self._greet, args=(caller, connection), name="dovetail-greeting", daemon=True)
        with self._lock:
            if len(self._open) >= _MAX_GREETINGS:
                addresses = [one.address for one in self._open]
                self._cut(next(one for one in self._open if one.address == max(addresses, key=addresses.count)))
            self._open.append(caller)
        thread.start()

    def end_overdue(self) -> None:
        """Ends those that took too long. Call it now and then."""
        with self._lock:
            for caller in [one for one in self._open if time.monotonic() >= one.deadline]:
                self._cut(caller)

    def close(self) -> None:
        """Ends all. Does not wait for their threads: what closes a hub may be a finalizer in one of them."""
        with self._lock:
            for caller in list(self._open):
                self._cut(caller)

    def _cut(self, caller: _Caller) -> None:
        self._open.remove(caller)
        with contextlib.suppress(OSError):  # the caller hung up already
            caller.end.shutdown(socket.SHUT_RDWR)

    def _greet(self, caller: _Caller, connection: Connection) -> None:
        try:
            hello = self._hello(connection)
            with self._lock:
                if caller not in self._open:
                    raise ConnectionAbortedError("it was ended for others")
                self._open.remove(caller)
            self._admit(hello, connection, caller.address)
        except AuthenticationError:
            self._refuse(caller.address, "it has another key")
            connection.close()
        except Exception as error:  # whatever a caller says ends that caller only
            self._refuse(caller.address, self._why(caller, error))
            connection.close()
        finally:
            with self._lock:
                if caller in self._open:
                    self._open.remove(caller)
                caller.end.close()

    def _hello(self, connection: Connection) -> Mapping[str, Any]:
        deliver_challenge(connection, self._key)
        answer_challenge(connection, self._key)
        hello = json.loads(connection.recv_bytes(_MAX_HELLO_BYTES))
        if not isinstance(hello, dict):
            raise ValueError(f"its hello is no object, but a {type(hello).__name__}")
        wanted = {"token": str} if hello.get("role") == "rank" else {"name": str, "address": str, "versions": dict}
        wrong = [name for name, kind in wanted.items() if not isinstance(hello.get(name), kind)]
        if wrong:
            raise ValueError(f"its hello has no valid {', '.join(wrong)}")
        return hello

    def _why(self, caller: _Caller, error: Exception) -> str:
        if time.monotonic() >= caller.deadline:
            return f"it did not end the greeting in {_DEADLINE_S:g} s"
        return f"it broke off the greeting ({error!r})"
