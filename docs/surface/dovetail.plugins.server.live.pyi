from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dovetail.commands import ResolvedServer
from dovetail.contracts.engine_client import EngineClient
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route
from dovetail.plugins.server.host import ServerHost
from starlette.types import ASGIApp
from typing import Any


@dataclass(frozen=True)
class LiveServer:
    address: tuple[str, int]
    host: ServerHost
    app: ASGIApp
    scheme: str = 'http'
    @property
    def url(self) -> str: ...

@contextmanager
def live_server(
    engine: EngineClient,
    routes: Mapping[str, tuple[type[Route], PluginOptions]],
    *,
    model_names: tuple[str, ...] = (),
    start_timeout_s: float | None = None,
    **settings: Any,
) -> Iterator[LiveServer]: ...
@contextmanager
def configured_server(
    engine: EngineClient,
    server: ResolvedServer,
    *,
    port: int = 0,
    start_timeout_s: float = 60.0,
) -> Iterator[LiveServer]: ...
