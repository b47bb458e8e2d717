"""From what an endpoint raises to the error that the client reads, in OpenAI's shape everywhere."""

from __future__ import annotations

import math

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dovetail.contracts.errors import DovetailError, QueueFull, RequestError, WorkerError
from dovetail.contracts.lora import AdapterConflict, AdapterNotFound
from dovetail.contracts.pausing import EngineConflict
from dovetail.contracts.route import APIError, json_error

RETRY_AFTER_S = 5
"""Where nobody knows when the engine is back."""


class ClientLeft(Exception):
    """The client closed its connection before the response was complete."""


def unavailable(message: str, retry_after_s: float = RETRY_AFTER_S) -> APIError:
    """A 503 that says when to try again."""
    return APIError(503, message, headers={"retry-after": _seconds(retry_after_s)})


def as_api_error(error: Exception, *, outage: str | None) -> APIError:
    """The error as a response. `outage`: see `ServerHost.outage`; what a server without an engine cannot do is no fault
    of the client."""
    if is_of_outage(error, outage):
        return unavailable(f"{outage} ({error})")
    if isinstance(error, APIError):
        return error
    if isinstance(error, QueueFull):
        return APIError(429, str(error), headers={"retry-after": _seconds(error.retry_after_s)})
    if isinstance(error, WorkerError):
        return unavailable(str(error))
    if isinstance(error, AdapterNotFound):
        return APIError(404, str(error), param="model", code="model_not_found")
    if isinstance(error, AdapterConflict | EngineConflict):
        return APIError(409, str(error))
    if isinstance(error, RequestError):
        return APIError(400, str(error))
    if isinstance(error, ClientDisconnect | ClientLeft):
        return APIError(499, "the client left")
    if isinstance(error, DovetailError):
        return APIError(500, str(error))
    return APIError(500, "internal error: the server's log has the traceback")


def is_of_outage(error: Exception, outage: str | None) -> bool:
    """Whether a request failed because there is no engine."""
    return outage is not None and isinstance(error, DovetailError) and not isinstance(error, APIError)


def error_body(error: APIError) -> bytes:
    """The body of an error response. Messages may quote what a template raised, which need not be valid Unicode."""
    content = json_error(error)
    content["error"]["message"] = str(error).encode("utf-8", "backslashreplace").decode()
    return orjson.dumps(content)


def error_response(error: APIError) -> Response:
    """The response of an error."""
    return Response(error_body(error), error.status, error.headers, "application/json")


def error_event(error: APIError) -> bytes:
    """The last event of a stream that failed. Anthropic's clients go by its name, OpenAI's by what is in it."""
    return b"event: error\ndata: " + error_body(error) + b"\n\n"


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the router raises: no such path, no such method."""
    assert isinstance(error, HTTPException)
    path, headers = request.url.path, dict(error.headers or {})
    message = str(error.detail)
    if error.status_code == 404:
        message = f"there is no {path} here; /openapi.json lists what there is"
    if error.status_code == 405:
        message = f"{path} does not take {request.method}, but {headers.get('Allow', 'other methods')}"
    return error_response(APIError(error.status_code, message, headers=headers))


async def on_validation_error(request: Request, error: Exception) -> Response:
    """Parameters that FastAPI validates for a route: status 400, not 422."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    return error_response(APIError(400, str(first["msg"]), param=".".join(place) or None))


def _seconds(time_s: float) -> str:
    return str(max(1, math.ceil(time_s)))
