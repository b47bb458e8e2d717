"""HTTP to servers of OpenAI's API, for commands that are clients of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson

from dovetail.commands.checks import require

_LONGEST = 500
"""Characters of an answer that a message quotes."""
_PASSWORD = re.compile(r"^((?:[A-Za-z][\w+.-]*://)?[^/?#:@]*):[^/?#]*@")
"""In an address: what is before the password, and the password."""


@dataclass(frozen=True)
class Failure:
    """Why a request brought no answer."""

    kind: str
    """For counting: "http 429", "connect", "timeout", "broken", or a command's own."""
    message: str


def parse_base_url(option: str, text: str) -> str:
    """Returns "http://host:port" with any path, without a slash or "/v1" at its end. Raises `ConfigError`."""
    parts = urlsplit(text)
    require(
        parts.scheme in ("http", "https") and bool(parts.netloc) and not parts.query,
        f"{option} {without_password(text)}: give the address of a server, as in {option} http://127.0.0.1:8000",
    )
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def without_password(url: str) -> str:
    """Returns an address, with or without its scheme, as it may be shown and stored: "***" for a password in it."""
    return _PASSWORD.sub(r"\1:***@", url)


def create_client(
    *,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 600.0,
    uds: str | None = None,
) -> httpx.AsyncClient:
    """Returns a client with kept connections and no limit on their number.

    Proxies of the environment are not used: a measurement goes to the server itself. Answers come uncompressed.
    `timeout_s`: longest wait for a connection, or between two pieces of an answer. `uds`: path of a Unix socket, which
    all requests go to.
    """
    own = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if api_key:
        own["Authorization"] = f"Bearer {api_key}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(
        headers={**own, **(headers or {})},
        timeout=httpx.Timeout(timeout_s),
        transport=httpx.AsyncHTTPTransport(uds=uds, limits=limits, trust_env=False),
        trust_env=False,
    )


def transport_failure(error: httpx.HTTPError) -> Failure:
    """Returns the failure of a request that ended without a whole answer."""
    detail = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return Failure("connect", detail)
    return Failure("timeout" if isinstance(error, httpx.TimeoutException) else "broken", detail)


def status_failure(status: int, body: bytes) -> Failure:
    """Returns the failure that an answer with another status than 200 tells."""
    return Failure(f"http {status}", error_message(body) or f"the server answered with status {status}")


def error_message(body: bytes) -> str:
    """Returns what an error answer says: OpenAI's {"error": {"message"}}, {"message"}, {"detail"}, or its text."""
    try:
        data: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace").strip()[:_LONGEST]
    inner = data.get("error", data) if isinstance(data, dict) else data
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return str(inner)[:_LONGEST]


__all__ = [
    "Failure",
    "create_client",
    "error_message",
    "parse_base_url",
    "status_failure",
    "transport_failure",
    "without_password",
]
