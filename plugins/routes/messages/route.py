"""The endpoints /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route, RouteHost
from dovetail.plugins.routes.messages.request import Asked, MessagesRequest, turn_of, what_is_asked
from dovetail.plugins.routes.messages.writer import MessageWriter
from dovetail.plugins.server.bodies import BodyReader, body_schema, json_response
from dovetail.plugins.server.streams import Streams, Submission, submission
from dovetail.plugins.server.turns.reading import TurnReader
from dovetail.plugins.server.turns.turn import PreparedTurn, form_origin, prepare, render


class MessagesRoute(Route):
    """POST /v1/messages and /v1/messages/count_tokens."""

    contract = (1, 7)

    def __init__(self, options: PluginOptions, host: RouteHost):
        super().__init__(options, host)
        self._bodies = BodyReader(MessagesRequest)

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["messages"])
        schema = body_schema(MessagesRequest)
        router.post("/v1/messages", openapi_extra=schema)(self.create)
        router.post("/v1/messages/count_tokens", openapi_extra=schema)(self.count_tokens)
        return router

    async def create(self, request: Request) -> Response:
        """Answers a conversation."""
        body = await self._bodies.read(request)
        model = await self.host.find_model(body.model)
        asked = what_is_asked(body, model.name, self.host.engine.facts)
        prepared = await prepare(self.host, asked.turn, asked.params)
        how = submission(
            request,
            body,
            prepared.params,
            prefix="msg",
            form=form_origin(body, prepared, "output_config.format"),
            lora_request=model.lora_request,
        )
        writer = self._writer(asked, prepared, how)
        if body.stream:
            return self.host.event_stream(request, self._stream(writer, prepared, how))
        async with Streams(self.host.engine, [prepared.prompt], how) as streams:
            (output,) = await streams.last()
        return json_response(writer.whole(output))

    async def count_tokens(self, request: Request) -> Response:
        """The tokens of the prompt."""
        body = await self._bodies.read(request)
        await self.host.find_model(body.model)
        chat = await render(self.host, turn_of(body))
        content = {"input_tokens": len(chat.prompt["prompt_token_ids"])}
        return json_response(content)

    async def _stream(
        self, writer: MessageWriter, prepared: PreparedTurn, how: Submission
    ) -> AsyncGenerator[bytes, None]:
        async with Streams(self.host.engine, [prepared.prompt], how) as streams:
            async for frame in writer.frames(streams.outputs()):
                yield frame

    def _writer(self, asked: Asked, prepared: PreparedTurn, how: Submission) -> MessageWriter:
        reader = TurnReader(self.host.dialect, prepared.request, shows_reasoning=asked.shows_reasoning)
        return MessageWriter(how.response_id, asked.model, reader)
