"""The process of one rank on a machine that joined: dials the driver, and serves it.

Its standard input is a pipe of the agent: one line of JSON, and then nothing until the agent is gone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from typing import NoReturn

from dovetail.contracts.joining import dial, set_patience
from dovetail.executors.processes import serve

_PR_SET_PDEATHSIG = 1
_GREETING_S = 30.0


def main() -> NoReturn:
    """Runs until the driver ends the connection, or the agent ends."""
    if sys.platform == "linux":  # also ends a process that is halted, which the thread below cannot
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    launch = json.loads(_read_line())
    threading.Thread(target=_exit_with_agent, daemon=True).start()
    host, port = launch["driver"]
    connection = dial((host, port), bytes.fromhex(launch["key"]), patience_s=_GREETING_S)  # the engine may be halted
    connection.send_bytes(json.dumps({"role": "rank", "token": launch["token"]}).encode())
    set_patience(connection, 0.0)
    serve(connection)
    # As children of multiprocessing end: taking down what torch has loaded takes seconds, in which nobody needs it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            os._exit(1)  # the agent is gone
        line += byte
    return line


def _exit_with_agent() -> NoReturn:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
