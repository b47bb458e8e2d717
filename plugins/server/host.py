"""What routes get from the server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from dovetail.commands import create_dialect
from dovetail.contracts.engine_client import EngineClient
from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.route import APIError, ServedModel
from dovetail.plugins.server.exchange import Exchange
from dovetail.plugins.server.sse import EventStream

if TYPE_CHECKING:
    from dovetail.contracts.dialect import Dialect


class ServerHost:
    """The `RouteHost` of one API process. Whoever supervises the engine replaces `engine` and sets `is_draining`."""

    def __init__(
        self,
        engine: EngineClient,
        model_names: Sequence[str] = (),
        num_api_processes: int = 1,
        request_chat_templates: bool = True,
        *,
        restarts_engine: bool = False,
    ):
        """`model_names`: empty for the path of the engine's model. `restarts_engine`: whether an engine that ends is
        started again."""
        self.engine = engine
        self.model_names = tuple(model_names) or (engine.facts.model,)
        self.num_api_processes = num_api_processes
        self.request_chat_templates = request_chat_templates
        self.is_draining = False
        self._restarts_engine = restarts_engine
        self.under_way: set[Exchange] = set()
        """Requests that have no complete response."""
        self._dialect: Dialect | None = None
        self._adapters: frozenset[str] = frozenset()
        """Those that the engine had when it was last asked. It has the last word, since others may unload them."""

    @property
    def dialect(self) -> Dialect:
        """See `RouteHost.dialect`. Created when a route first asks for it; a restarted engine has the same."""
        if self._dialect is None:
            self._dialect = create_dialect(self.engine.facts)
        if self._dialect is None:
            raise APIError(
                501,
                "chat needs a tokenizer and a dialect, and this engine lacks one of them "
                "(model.tokenizer_mode is none, or dialect is null)",
            )
        return self._dialect

    def outage(self) -> str | None:
        """What is said of an engine that ended, and whether another comes; None while it runs."""
        if self.engine.is_running:
            return None
        if self._restarts_engine and not self.is_draining:
            return "the engine ended and is being started again: send the request again later"
        return "the engine ended for good: send the request to another server"

    def check_model(self, name: str | None) -> str:
        """See `RouteHost.check_model`."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise self._not_served(name, self.model_names)
        return name

    async def find_model(self, name: str | None) -> ServedModel:
        """See `RouteHost.find_model`. Asks the engine for names that are new to this process only: it answers between
        two steps."""
        if name is None or name in self.model_names:
            return ServedModel(self.check_model(name))
        if name not in self._adapters and self.engine.facts.max_loras:
            self._adapters = frozenset(adapter.name for adapter in await self.engine.list_loras())
        if name not in self._adapters:
            raise self._not_served(name, (*self.model_names, *sorted(self._adapters)))
        return ServedModel(name, LoRARequest(name))

    def _not_served(self, name: str, served: Sequence[str]) -> APIError:
        message = f"the model {name!r} is not served here, but {', '.join(served)}"
        return APIError(404, message, param="model", code="model_not_found")

    def event_stream(self, request: Request, frames: AsyncGenerator[bytes, None]) -> Response:
        """See `RouteHost.event_stream`."""
        return EventStream(frames)
