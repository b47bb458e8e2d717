"""The endpoints /v1/chat/completions and /v1/chat/completions/render."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route, RouteHost, ServedModel
from dovetail.plugins.routes.chat.choices import ChoiceWriter
from dovetail.plugins.routes.chat.frames import FrameWriter
from dovetail.plugins.routes.chat.request import Asked, ChatRequest, what_is_asked
from dovetail.plugins.routes.completions.logprobs import prompt_logprobs
from dovetail.plugins.server.bodies import BodyReader, body_schema, json_response
from dovetail.plugins.server.fingerprint import system_fingerprint
from dovetail.plugins.server.streams import Streams, Submission, submission
from dovetail.plugins.server.transfer import transfer_fields
from dovetail.plugins.server.turns.prefix import prefix_fields
from dovetail.plugins.server.turns.turn import PreparedTurn, form_origin, prepare
from dovetail.plugins.server.usage import usage_of


class ChatOptions(PluginOptions):
    """What requests get that do not say otherwise."""

    return_tokens_as_token_ids: bool = Field(
        default=False, description='Show tokens of log probabilities as "token_id:N" where a request does not say'
    )
    exclude_tools_when_tool_choice_none: bool = Field(
        default=False, description="Show the model no tools under tool_choice none"
    )


class ChatRoute(Route):
    """POST /v1/chat/completions, and /v1/chat/completions/render, which shows the prompt and generates nothing."""

    contract = (1, 9)
    Options = ChatOptions
    options: ChatOptions

    def __init__(self, options: ChatOptions, host: RouteHost):
        super().__init__(options, host)
        self._bodies = BodyReader(ChatRequest)

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["chat"])
        schema = body_schema(ChatRequest)
        router.post("/v1/chat/completions", openapi_extra=schema)(self.complete)
        router.post("/v1/chat/completions/render", openapi_extra=schema)(self.render)
        return router

    async def complete(self, request: Request) -> Response:
        """Answers a conversation."""
        body, model, asked, prepared = await self._prepared(request)
        how = submission(
            request,
            body,
            prepared.params,
            prefix="chatcmpl",
            form=form_origin(body, prepared, "response_format"),
            lora_request=model.lora_request,
        )
        if body.stream:
            return self.host.event_stream(request, self._stream(body, asked, prepared, how))
        async with Streams(self.host.engine, [prepared.prompt], how) as streams:
            (output,) = await streams.last()
        return json_response(self._response(asked, prepared, how, output))

    async def render(self, request: Request) -> Response:
        """The prompt of a conversation: its text and its token ids."""
        _, _, asked, prepared = await self._prepared(request)
        ids = prepared.prompt["prompt_token_ids"]
        content = {
            "model": asked.model,
            "prompt": prepared.prompt.get("prompt"),
            "prompt_token_ids": ids,
            "count": len(ids),
            "max_model_len": self.host.engine.facts.max_model_len,
            **prefix_fields(prepared.prefix),
        }
        return json_response(content)

    async def _prepared(self, request: Request) -> tuple[ChatRequest, ServedModel, Asked, PreparedTurn]:
        body = await self._bodies.read(request)
        if body.return_tokens_as_token_ids is None:
            body.return_tokens_as_token_ids = self.options.return_tokens_as_token_ids
        if self.options.exclude_tools_when_tool_choice_none and body.tool_choice == "none":
            body.tools = None
        model = await self.host.find_model(body.model)
        asked = what_is_asked(body, model.name, self.host.engine.facts)
        return body, model, asked, await prepare(self.host, asked.turn, asked.params)

    async def _stream(
        self, body: ChatRequest, asked: Asked, prepared: PreparedTurn, how: Submission
    ) -> AsyncGenerator[bytes, None]:
        head = self._head("chat.completion.chunk", asked, how)

        def create_writer(index: int) -> ChoiceWriter:
            return self._writer(index, asked, prepared)

        first = prefix_fields(prepared.prefix)
        writer = FrameWriter(head, asked, body.stream_options, create_writer, first)
        async with Streams(self.host.engine, [prepared.prompt], how) as streams:
            async for frame in writer.frames(streams.outputs()):
                yield frame

    def _response(self, asked: Asked, prepared: PreparedTurn, how: Submission, output: RequestOutput) -> dict[str, Any]:
        choices = [
            self._writer(completion.index, asked, prepared).whole(output, completion) for completion in output.outputs
        ]
        response = {**self._head("chat.completion", asked, how), "choices": choices}
        response["usage"] = asked.usage(usage_of([output]), output.metrics)
        if asked.with_token_ids:
            response["prompt_token_ids"] = output.prompt_token_ids
        response |= {**prefix_fields(prepared.prefix), **transfer_fields([output])}
        if asked.with_prompt_logprobs:
            response["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return response

    def _writer(self, index: int, asked: Asked, prepared: PreparedTurn) -> ChoiceWriter:
        return ChoiceWriter(index, asked, self.host.dialect, prepared.request, self.host.engine.token_texts)

    def _head(self, kind: str, asked: Asked, how: Submission) -> dict[str, Any]:
        return {
            "id": how.response_id,
            "object": kind,
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": system_fingerprint(self.host.engine.facts),
        }
