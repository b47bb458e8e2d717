"""A server in a thread of this process, on a free port: for tests of routes, and for notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from dovetail.contracts.engine_client import EngineClient
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route
from dovetail.plugins.server.api import APIServer, listen
from dovetail.plugins.server.app import create_app
from dovetail.plugins.server.host import ServerHost
from dovetail.plugins.server.settings import ServerSettings


@dataclass(frozen=True)
class LiveServer:
    """A server that answers."""

    address: tuple[str, int]
    """For a socket."""
    host: ServerHost
    app: ASGIApp
    scheme: str = "http"

    @property
    def url(self) -> str:
        """For HTTP clients."""
        return f"{self.scheme}://{self.address[0]}:{self.address[1]}"


@contextmanager
def live_server(
    engine: EngineClient,
    routes: Mapping[str, tuple[type[Route], PluginOptions]],
    *,
    model_names: tuple[str, ...] = (),
    **settings: Any,
) -> Iterator[LiveServer]:
    """Serves until the block ends. `routes`: class and options by label; `settings`: fields of `ServerSettings`."""
    given = ServerSettings(**{"port": 0, "drain_timeout_s": 0.0, "access_log": False, **settings})
    host = ServerHost(engine, model_names, request_chat_templates=given.request_chat_templates)
    app = create_app(host, {label: kind(options, host) for label, (kind, options) in routes.items()}, given)
    server, ready = _Announced(app, host, given), threading.Event()
    server.ready = ready
    listener = listen(given)
    address = listener.getsockname()[:2]
    thread = threading.Thread(target=server.run, args=([listener],), name="dovetail-server", daemon=True)
    thread.start()
    try:
        while not ready.wait(0.1):
            if not thread.is_alive():
                raise RuntimeError("the server did not start: its log says why")
        yield LiveServer(address, host, app, "https" if given.tls is not None else "http")
    finally:
        server.end()
        thread.join()


class _Announced(APIServer):
    """Says when it listens, and ends when another thread asks."""

    ready: threading.Event

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._own_loop = asyncio.get_running_loop()
        self.ready.set()

    def end(self) -> None:
        """From any thread."""
        if self.started:
            self._own_loop.call_soon_threadsafe(self.drain)
