"""Limits of a request's body: its size, and how long it may take to arrive."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.contracts.route import APIError

_CLOSE = {"connection": "close"}
"""What is left of a body that nobody reads must not be taken for the next request."""


class BodyLimits:
    """Middleware. A body that announces too many bytes is refused before one of them is read."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float):
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        if b"content-length" not in headers and b"transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        if int(headers.get(b"content-length", 0)) > self._max_bytes:
            raise self._too_large()
        await self._app(scope, _LimitedBody(receive, self._max_bytes, self._timeout_s, self._too_large()).receive, send)

    def _too_large(self) -> APIError:
        limit = self._max_bytes / 2**20
        message = f"the body is longer than {limit:g} MiB: send less, or raise server.max_body_mib"
        return APIError(413, message, headers=_CLOSE)


class _LimitedBody:
    """The parts of one body."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float, too_large: APIError):
        self._receive = receive
        self._num_left = max_bytes
        self._timeout_s = timeout_s
        self._too_large = too_large
        self._deadline: float | None = None
        self._is_complete = False

    async def receive(self) -> Message:
        if self._is_complete:
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            text = f"the body did not arrive within {self._timeout_s:g} seconds (server.body_timeout_s)"
            raise APIError(408, text, headers=_CLOSE) from None
        self._num_left -= len(message.get("body", b""))
        if self._num_left < 0:
            raise self._too_large
        self._is_complete = not message.get("more_body", False)
        return message
