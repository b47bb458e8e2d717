"""A server for one batch: `dovetail serve` in a process of its own, on a socket that other users cannot reach."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from dovetail.commands.checks import require
from dovetail.commands.installed import import_environment, module_command
from dovetail.contracts.errors import DovetailError

BASE_URL = "http://dovetail"
"""Any name: the socket says where the server is."""
_POLL_S = 0.1
_END_S = 30.0
# The batch itself reports what becomes of requests.
_SETTINGS = ("server.tls=null", "server.access_log=false")


@contextmanager
def own_server(source: str | None, options: Sequence[str]) -> Iterator[str]:
    """The path of the socket of a server that is ready, until the block ends.

    `source`: a config file or a model, None for the default model; `options`: as of `dovetail serve -o`. What the
    server says goes to stderr. Raises `DovetailError` where it ends before it is ready.
    """
    require(
        sys.platform != "win32", "without --base-url a Unix socket is needed: start `dovetail serve`, and give its URL"
    )
    with tempfile.TemporaryDirectory(prefix="dovetail-batch-") as directory:
        path = str(Path(directory) / "socket")
        settings = [f"server.uds={path}", *_SETTINGS]
        given = [part for option in [*options, *settings] for part in ("-o", option)]
        command = module_command("dovetail", "serve", *([source] if source else []), *given)
        with subprocess.Popen(command, env=import_environment()) as process:
            try:
                _wait(process, path)
                yield path
            finally:
                _end(process)


def _wait(process: subprocess.Popen[bytes], path: str) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url=BASE_URL, timeout=10.0) as client:
        while process.poll() is None:
            with suppress(httpx.TransportError):
                if _is_listening(path) and client.get("/ready").status_code == 200:
                    return
            time.sleep(_POLL_S)
    raise DovetailError(
        f"`dovetail serve` ended with code {process.returncode} before it was ready: what it says above is the cause"
    )


def _is_listening(path: str) -> bool:
    """Asked first, since httpx leaves the socket of a refused connection open."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.connect(path)
        return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
