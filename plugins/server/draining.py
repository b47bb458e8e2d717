"""A server that ends takes no new requests."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from dovetail.plugins.server.errors import unavailable
from dovetail.plugins.server.host import ServerHost
from dovetail.plugins.server.paths import route_path


class Draining:
    """Middleware. Refuses requests with 503 while the server drains, those of `open_paths` excepted."""

    def __init__(self, app: ASGIApp, *, host: ServerHost, open_paths: frozenset[str]):
        self._app = app
        self._host = host
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_refused = self._host.is_draining and scope["type"] == "http"
        if is_refused and route_path(scope) not in self._open_paths:
            raise unavailable("this server is shutting down: send the request again, to another")
        await self._app(scope, receive, send)
