"""HEAD requests."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class Heads:
    """Middleware. HEAD is answered as GET is, for every endpoint; the server below sends no body."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)
