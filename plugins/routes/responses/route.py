"""The endpoints under /v1/responses."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import APIError, Route, RouteHost
from dovetail.plugins.routes.responses.logprobs import TokenReader
from dovetail.plugins.routes.responses.request import Asked, ResponsesRequest, what_is_asked
from dovetail.plugins.routes.responses.store import ResponseStore
from dovetail.plugins.routes.responses.writer import ResponseWriter
from dovetail.plugins.server.bodies import BodyReader, body_schema, json_response
from dovetail.plugins.server.streams import Streams, Submission, submission
from dovetail.plugins.server.turns.reading import TurnReader
from dovetail.plugins.server.turns.turn import PreparedTurn, form_origin, prepare


class ResponsesOptions(PluginOptions):
    """What is kept of earlier responses."""

    max_mib: float = Field(default=64.0, gt=0, description="Most memory of kept responses in MiB")
    max_age_s: float = Field(default=3600.0, gt=0, description="How long a response is kept")


class ResponsesRoute(Route):
    """POST /v1/responses; GET and DELETE of one that is kept."""

    contract = (1, 7)
    Options = ResponsesOptions
    options: ResponsesOptions

    def __init__(self, options: ResponsesOptions, host: RouteHost):
        super().__init__(options, host)
        self._bodies = BodyReader(ResponsesRequest)
        self._store = ResponseStore(int(options.max_mib * 2**20), options.max_age_s, time.monotonic)

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["responses"])
        router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))(self.create)
        router.get("/v1/responses/{response_id}")(self.retrieve)
        router.delete("/v1/responses/{response_id}")(self.delete)
        router.post("/v1/responses/{response_id}/cancel")(self.cancel)
        return router

    async def create(self, request: Request) -> Response:
        """Answers a conversation."""
        body = await self._bodies.read(request)
        model = await self.host.find_model(body.model)
        keeps = self._keeps(body)
        earlier = self._items(body.previous_response_id) if body.previous_response_id is not None else []
        asked = what_is_asked(body, model.name, self.host.engine.facts, earlier)
        prepared = await prepare(self.host, asked.turn, asked.params)
        how = submission(
            request,
            body,
            prepared.params,
            prefix="resp",
            form=form_origin(body, prepared, "text.format"),
            lora_request=model.lora_request,
        )
        # Whoever knows the id of a kept response can read it.
        how = replace(how, response_id=f"resp_{secrets.token_hex(16)}")
        writer = self._writer(asked, prepared, how, keeps)

        def keep(response: dict[str, Any]) -> None:
            if keeps:
                self._store.put(response, [*asked.items, *filter(_is_whole, response["output"])])

        if body.stream:
            return self.host.event_stream(request, self._stream(writer, prepared, how, keep))
        async with Streams(self.host.engine, [prepared.prompt], how) as streams:
            (output,) = await streams.last()
        response = await writer.whole(output)
        keep(response)
        return json_response(response)

    async def retrieve(self, response_id: str) -> Response:
        """A response that is kept."""
        response = self._store.response(response_id)
        if response is None:
            raise self._not_kept(response_id)
        return json_response(response)

    async def delete(self, response_id: str) -> Response:
        """Forgets a response."""
        if not self._store.delete(response_id):
            raise self._not_kept(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str) -> Response:
        """Refused."""
        raise APIError(400, "only responses in the background are cancelled: close the connection of others")

    def _keeps(self, body: ResponsesRequest) -> bool:
        """Whether the response is kept. Raises `APIError` 400 where that is asked for, and cannot be."""
        if self.host.num_api_processes == 1:
            return body.store is not False
        for name in ("store", "previous_response_id"):
            if getattr(body, name):
                message = (
                    f"{name}: responses are kept in the memory of one API process, and this server has"
                    f" {self.host.num_api_processes}, any of which may get your next request: send all items with"
                    " store: false, or start the server with one API process"
                )
                raise APIError(400, message, param=name)
        return False

    def _items(self, response_id: str) -> list[dict[str, Any]]:
        items = self._store.items(response_id)
        if items is None:
            error = self._not_kept(response_id)
            raise APIError(error.status, str(error), param="previous_response_id", code="previous_response_not_found")
        return items

    def _not_kept(self, response_id: str) -> APIError:
        message = f"there is no response {response_id!r}: responses are kept for {self.options.max_age_s:g} seconds"
        return APIError(404, message, param="response_id")

    async def _stream(
        self,
        writer: ResponseWriter,
        prepared: PreparedTurn,
        how: Submission,
        keep: Callable[[dict[str, Any]], None],
    ) -> AsyncGenerator[bytes, None]:
        async with Streams(self.host.engine, [prepared.prompt], how) as streams:
            async for frame in writer.frames(streams.outputs(), keep):
                yield frame

    def _writer(self, asked: Asked, prepared: PreparedTurn, how: Submission, keeps: bool) -> ResponseWriter:
        head = {
            "id": how.response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": asked.model,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "store": keeps,
            **asked.shown,
        }
        reader = TurnReader(self.host.dialect, prepared.request)
        tokens = None
        if asked.with_logprobs:
            tokens = TokenReader(reader, self.host.engine.token_texts, asked.params.logprobs or 0)
        return ResponseWriter(head, reader, tokens, self._count_tokens)

    async def _count_tokens(self, text: str) -> int:
        return len(await self.host.engine.tokenize(text, add_special_tokens=False))


def _is_whole(item: dict[str, Any]) -> bool:
    """Calls that the model did not finish are shown to it in no later prompt."""
    return item["type"] != "function_call" or item["status"] == "completed"
