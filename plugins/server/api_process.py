"""An API process: what the supervisor tells it, and what runs in it. It speaks HTTP and makes text; it never imports
torch."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import uvloop

from dovetail import RemoteEngine
from dovetail.commands import Component, create_class
from dovetail.contracts.route import Route
from dovetail.plugins.server.api import APIServer
from dovetail.plugins.server.app import create_app
from dovetail.plugins.server.host import ServerHost
from dovetail.plugins.server.settings import ServerSettings

logger = logging.getLogger("dovetail.server")


@dataclass(frozen=True, kw_only=True)
class APIJob:
    """One API process. It travels over a pipe."""

    engine: str
    """Address of the engine."""
    settings: ServerSettings
    model_names: tuple[str, ...]
    routes: Mapping[str, Component]
    """By label."""
    num_api_processes: int = 1
    """How many have this job."""


class APIProcess:
    """An API process, seen from the one that started it. It ends when that one does, however that ends."""

    def __init__(self, job: APIJob, listener: socket.socket):
        """`listener`: the socket that all API processes accept from."""
        fd = listener.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dovetail.plugins.server.api_process", str(fd)],
            stdin=subprocess.PIPE,
            pass_fds=[fd],
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        pickle.dump(job, self._pipe)
        self._pipe.flush()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def join(self) -> int:
        """Waits for the end; the exit code, negative for a signal."""
        return self._process.wait()

    def drain(self) -> None:
        """Has it take no new requests, and end once those under way are done."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Ends it at once."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """Lets go of a process that has ended."""
        self._process.wait()
        self._pipe.close()


async def serve(job: APIJob, listener: socket.socket) -> None:
    """Serves until a signal."""
    async with await RemoteEngine.connect(job.engine) as engine:
        host = ServerHost(engine, job.model_names, job.num_api_processes)
        routes = {label: _create(component, host) for label, component in job.routes.items()}
        app = create_app(host, routes, job.settings)
        # What was imported and built stays: looking through it for garbage would hold up all streams.
        gc.collect()
        gc.freeze()
        await APIServer(app, host, job.settings).serve(sockets=[listener])


def _create(component: Component, host: ServerHost) -> Route:
    plugin, options = create_class(component)
    assert issubclass(plugin, Route)
    return plugin(options, host)


def main() -> None:
    """What runs in the process."""
    job: APIJob = pickle.load(sys.stdin.buffer)
    logging.basicConfig(level=job.settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    uvloop.run(serve(job, socket.socket(fileno=int(sys.argv[1]))))


def _end_with_parent() -> None:
    """The parent holds the other end of standard input, and lets go of it when it ends, however it ends."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
