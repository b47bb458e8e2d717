"""A server in a thread of this process, on a free port: for tests of routes, and for notebooks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from starlette.types import ASGIApp

from dovetail.commands import ResolvedServer, create_class
from dovetail.contracts.engine_client import EngineClient
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route
from dovetail.plugins.server.api import APIServer, listen
from dovetail.plugins.server.app import create_app
from dovetail.plugins.server.host import ServerHost
from dovetail.plugins.server.settings import ServerSettings, server_settings


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
    start_timeout_s: float | None = None,
    **settings: Any,
) -> Iterator[LiveServer]:
    """Serves until the block ends. `routes`: class and options by label; `settings`: fields of `ServerSettings`. Raises
    `RuntimeError` where the server does not listen within `start_timeout_s`; None: however long that takes."""
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
        _await(ready, thread, start_timeout_s)
    except BaseException:
        server.should_exit = True  # it ends by itself, should it start after all
        raise
    try:
        yield LiveServer(address, host, app, "https" if given.tls is not None else "http")
    finally:
        server.end()
        thread.join()


@contextmanager
def configured_server(
    engine: EngineClient, server: ResolvedServer, *, port: int = 0, start_timeout_s: float = 60.0
) -> Iterator[LiveServer]:
    """As `live_server`, with the routes and settings of a config; `port` in place of the config's. Raises `ConfigError`
    for a config with a Unix socket."""
    section = server.section
    if section["uds"] is not None:
        raise ConfigError("server.uds: a server in this process has an address of its own: set server.host alone")
    created = {label: create_class(component) for label, component in server.routes.items()}
    routes = {label: (cast("type[Route]", kind), options) for label, (kind, options) in created.items()}
    settings = {**vars(server_settings(section)), "port": port}
    names = tuple(section["served_model_name"])
    with live_server(engine, routes, model_names=names, start_timeout_s=start_timeout_s, **settings) as live:
        yield live


def _await(ready: threading.Event, thread: threading.Thread, timeout_s: float | None) -> None:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while not ready.wait(0.1):
        if not thread.is_alive():
            raise RuntimeError("the server did not start: its log says why")
        if deadline is not None and time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start within {timeout_s:g} s")


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
