"""Ids of requests: a client's own, or random. Responses show them in the header x-request-id."""

from __future__ import annotations

import re
import secrets

from starlette.requests import Request
from starlette.types import Scope

from dovetail.contracts.route import APIError

MAX_ID_CHARS = 512
"""Of a client's own id, which the engine remembers for a while."""

HEADER = b"x-request-id"
_KEY = "dovetail.request_id"
"""In the scope of a request."""
_ID = re.compile(r"[ -~]+")
"""What a header may show."""


def assign_id(scope: Scope) -> None:
    """Gives a request the id of its header, or a random one. Raises `APIError` 400 for one that no response can show;
    the request has a random one then."""
    scope[_KEY] = secrets.token_hex(8)
    own = next((value for name, value in scope["headers"] if name == HEADER), b"").decode("latin-1")
    if own:
        scope[_KEY] = _checked(own, "the header x-request-id", None)


def request_id(scope: Scope) -> str:
    """The id that `assign_id` or `name_request` gave."""
    found: str = scope[_KEY]
    return found


def name_request(request: Request, own: str | None) -> str:
    """The id of a request whose body gives `own`; None or "": none. Raises `APIError` 400 as `assign_id` does."""
    if own:
        request.scope[_KEY] = _checked(own, "request_id", "request_id")
    return request_id(request.scope)


def _checked(own: str, where: str, param: str | None) -> str:
    if len(own) > MAX_ID_CHARS:
        message = f"{where} has {len(own)} characters, and may have {MAX_ID_CHARS}: give a shorter one"
        raise APIError(400, message, param=param)
    if _ID.fullmatch(own) is None:
        message = f"{where} has characters other than those of printable ASCII: give another, or none"
        raise APIError(400, message, param=param)
    return own
