"""Route: endpoints of the server.

A route declares its endpoints on a `fastapi.APIRouter`; the server mounts it in every API process. Before an endpoint
runs, the server has checked the API key and the announced size of the body; the body's other limits apply as it is
read. The task of an endpoint is cancelled when its client leaves and when its time is over. An endpoint raises
`RequestError` for what a client did wrong (status 400) and `APIError` for any other status; the server writes both in
OpenAI's shape:

    {"type": "error",
     "error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": null}}

which is Anthropic's as well.

An API process never imports torch: neither may a route.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dovetail.contracts.engine_client import EngineClient
from dovetail.contracts.errors import DovetailError
from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.plugin import Plugin, PluginOptions

if TYPE_CHECKING:
    from fastapi import APIRouter, Request
    from starlette.responses import Response

    from dovetail.contracts.dialect import Dialect


class APIError(DovetailError):
    """A response with an error status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        """`param`: the field of the body that is wrong, dotted."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


@dataclass(frozen=True)
class ServedModel:
    """What a request names as its `model`."""

    name: str
    """Which the response shows."""
    lora_request: LoRARequest | None = None
    """What `EngineClient.submit` gets: the adapter that has the name; None for the model itself."""


class RouteHost(Protocol):
    """What a route gets from the server."""

    @property
    def engine(self) -> EngineClient:
        """The engine. Where it was restarted, the new one."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which the model is served, the first of which responses show."""

    @property
    def dialect(self) -> Dialect:
        """How the model writes reasoning and tool calls."""

    @property
    def num_api_processes(self) -> int:
        """How many API processes answer at this address. What one of them keeps in its memory, others do not have."""

    @property
    def request_chat_templates(self) -> bool:
        """Whether requests may bring a chat template of their own; routes refuse one otherwise."""

    @property
    def is_draining(self) -> bool:
        """Whether the server takes no new requests, and ends once those under way are done."""

    def check_model(self, name: str | None) -> str:
        """The name that the response shows. Raises `APIError` 404 for a model that is not served, adapters among them:
        a route that serves those calls `find_model`. None: the first."""

    async def find_model(self, name: str | None) -> ServedModel:
        """The model, or the adapter of that name. Raises `APIError` 404 for what is not served. None: the first model.
        An adapter may be unloaded before `submit` is called with it, which raises `AdapterNotFound` then."""

    def event_stream(self, request: Request, frames: AsyncGenerator[bytes, None]) -> Response:
        """A response of server-sent events. `frames` are whole events as they go over the wire; the first is awaited
        before the status is sent, so what raises before it becomes an error response. What it raises later becomes a
        last event with the error. When the client leaves, or the time limit is over, the generator is cancelled where
        it waits: it submits requests inside its own `try`, and closes their streams in `finally`."""


class Route(Plugin):
    """Endpoints. Created once per API process; its coroutines run on the server's event loop."""

    open_paths: ClassVar[frozenset[str]] = frozenset()
    """Of its paths, those that need no API key, and answer while the server drains."""

    def __init__(self, options: PluginOptions, host: RouteHost):
        self.options = options
        self.host = host

    @abstractmethod
    def router(self) -> APIRouter:
        """The endpoints, declared once. A path that another route has is an error at start."""

    async def close(self) -> None:
        """The server ends: nothing is called any more."""
        return None


def json_error(error: APIError) -> dict[str, Any]:
    """The body of an error response, in OpenAI's shape and Anthropic's."""
    return {
        "type": "error",
        "error": {
            "message": str(error),
            "type": error_type(error.status),
            "param": error.param,
            "code": error.code,
        },
    }


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_type(status: int) -> str:
    """The `type` of an error by its status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
