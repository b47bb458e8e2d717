"""API keys: who may call the server."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from dovetail.contracts.route import APIError
from dovetail.plugins.server.paths import route_path


class APIKeys:
    """Middleware. A request has one of the keys as `Authorization: Bearer KEY` or as `x-api-key: KEY`."""

    def __init__(self, app: ASGIApp, *, keys: Iterable[str], open_paths: frozenset[str]):
        """`open_paths` need no key."""
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and route_path(scope) not in self._open_paths:
            given = _given_key(scope["headers"])
            if given is None:
                raise _refused("this server wants an API key: send `Authorization: Bearer KEY`")
            if not self._is_known(given):
                raise _refused("the API key is wrong")
        await self._app(scope, receive, send)

    def _is_known(self, given: bytes) -> bool:
        """Takes as long for any key: digests are of one length, and all are compared."""
        digest, is_known = _digest(given), False
        for known in self._digests:
            is_known |= hmac.compare_digest(digest, known)
        return is_known


def _given_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"x-api-key":
            return value
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
    return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refused(message: str) -> APIError:
    return APIError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
