"""An API process: what the supervisor tells it, and what runs in it. It speaks HTTP and makes text; it never imports
torch."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType

import uvloop
from starlette.types import ASGIApp

from dovetail import RemoteEngine, ReplicatedEngine
from dovetail.commands import Component, create_class
from dovetail.commands.installed import import_environment, module_command
from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.contracts.router import Router
from dovetail.plugins.server.api import APIServer
from dovetail.plugins.server.app import create_app, create_routes
from dovetail.plugins.server.host import ServerHost
from dovetail.plugins.server.settings import ServerSettings

_DRAIN = signal.SIGUSR1
"""The supervisor's signal: take no new requests, and end."""


@dataclass(frozen=True, kw_only=True)
class APIJob:
    """One API process. It travels over a pipe."""

    engines: tuple[str, ...]
    """Address of the engine, or of each of its replicas."""
    settings: ServerSettings
    model_names: tuple[str, ...]
    routes: Mapping[str, Component]
    """By label."""
    num_api_processes: int = 1
    """How many have this job."""
    restarts_engine: bool = False
    """Whether the supervisor starts an engine that ended again."""
    router: Component | None = None
    """Which replica takes a request; None where there is one."""
    retries: int = 0
    """Times that a request moves to another replica."""


class APIProcess:
    """An API process, seen from the one that started it. It ends when that one does, however that ends, and takes no
    signal that reaches a terminal's or a service's processes together."""

    def __init__(self, job: APIJob, listener: socket.socket):
        """`listener`: the socket that all API processes accept from."""
        fd = listener.fileno()
        self._process = subprocess.Popen(
            module_command("dovetail.plugins.server.api_process", str(fd)),
            env=import_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd],
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        pickle.dump(job, self._pipe)
        self._pipe.flush()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def wait(self) -> bool:
        """Waits for the start; False where the process died meanwhile. Raises `ConfigError` with what kept it from
        serving."""
        assert self._process.stdout is not None
        data = self._process.stdout.read()
        if not data:
            return False
        fault: str | None = pickle.loads(data)
        if fault is not None:
            raise ConfigError(fault)
        return True

    def join(self) -> int:
        """Waits for the end; the exit code, negative for a signal."""
        return self._process.wait()

    def drain(self) -> None:
        """Has it take no new requests, and end once those under way are done."""
        if self._process.poll() is None:
            self._process.send_signal(_DRAIN)

    def kill(self) -> None:
        """Ends it at once."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """Lets go of a process that has ended."""
        self._process.wait()
        self._pipe.close()
        assert self._process.stdout is not None
        self._process.stdout.close()


class _SupervisedServer(APIServer):
    """Says when it listens. It ends when the supervisor says so, which alone takes SIGINT and SIGTERM."""

    def __init__(self, app: ASGIApp, host: ServerHost, settings: ServerSettings, on_ready: Callable[[], None]):
        super().__init__(app, host, settings)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        asyncio.get_running_loop().add_signal_handler(_DRAIN, self.drain)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See `APIServer.handle_exit`."""


async def serve(job: APIJob, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serves until it is drained; `on_ready` is called once it listens."""
    async with await _connect(job) as engine:
        host = ServerHost(
            engine,
            job.model_names,
            job.num_api_processes,
            job.settings.request_chat_templates,
            restarts_engine=job.restarts_engine,
        )
        app = create_app(host, create_routes(job.routes, host), job.settings)
        # What was imported and built stays: looking through it for garbage would hold up all streams.
        gc.collect()
        gc.freeze()
        await _SupervisedServer(app, host, job.settings, on_ready).serve(sockets=[listener])


async def _connect(job: APIJob) -> RemoteEngine | ReplicatedEngine:
    if job.router is None:
        return await RemoteEngine.connect(job.engines[0])
    plugin, options = create_class(job.router)
    assert issubclass(plugin, Router)
    return await ReplicatedEngine.connect(job.engines, partial(plugin, options), retries=job.retries)


def main() -> None:
    """What runs in the process. What became of the start goes over standard output: a pickled None, or a message."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a service manager's reach every process; the supervisor decides

    def answer(fault: str | None) -> None:
        with answers:
            pickle.dump(fault, answers)

    job: APIJob = pickle.load(sys.stdin.buffer)
    logging.basicConfig(level=job.settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        uvloop.run(serve(job, socket.socket(fileno=int(sys.argv[1])), lambda: answer(None)))
    except Exception as error:
        if answers.closed:
            raise
        answer(str(error) if isinstance(error, DovetailError) else f"{type(error).__name__}: {error}")
        sys.exit(1)


def _end_with_parent() -> None:
    """The parent holds the other end of standard input, and lets go of it when it ends, however it ends."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
