"""Ports of servers that a test starts later, and maybe again."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from itertools import count

_PORTS = range(20000, 32000)
"""Below the range from which Linux takes ports by default, for connections too: nobody gets one of these meanwhile."""
_SPACING = 101
"""Between the first tries of the processes of a test run, whose ids are neighbours."""

_tries = count(os.getpid() * _SPACING)


def free_ports(number: int = 1, host: str = "127.0.0.1") -> int:
    """The first of so many ports in a row that nobody has, and that no other test of this process got. Raises
    `OSError` where the machine has no such address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        first, *_ = (_PORTS[next(_tries) % len(_PORTS)] for _ in range(number))
        with ExitStack() as bound:
            try:
                for port in range(first, first + number):
                    bound.enter_context(socket.socket(family)).bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise
        return first
