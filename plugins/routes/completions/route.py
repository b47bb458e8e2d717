"""The endpoint /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route, RouteHost
from dovetail.plugins.routes.completions.choices import ChoiceWriter
from dovetail.plugins.routes.completions.frames import FrameWriter
from dovetail.plugins.routes.completions.request import Asked, CompletionRequest, form_origin, prompts_of, what_is_asked
from dovetail.plugins.server.bodies import BodyReader, body_schema, json_response
from dovetail.plugins.server.fingerprint import system_fingerprint
from dovetail.plugins.server.streams import Streams, Submission, submission
from dovetail.plugins.server.transfer import transfer_fields
from dovetail.plugins.server.usage import usage, usage_of


class CompletionsOptions(PluginOptions):
    """What requests get that do not say otherwise."""

    return_tokens_as_token_ids: bool = Field(
        default=False, description='Show tokens of log probabilities as "token_id:N" where a request does not say'
    )


class CompletionsRoute(Route):
    """POST /v1/completions."""

    contract = (1, 9)
    Options = CompletionsOptions
    options: CompletionsOptions

    def __init__(self, options: CompletionsOptions, host: RouteHost):
        super().__init__(options, host)
        self._bodies = BodyReader(CompletionRequest)

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["completions"])
        router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))(self.complete)
        return router

    async def complete(self, request: Request) -> Response:
        """Completes one prompt or several."""
        body = await self._bodies.read(request)
        if body.return_tokens_as_token_ids is None:
            body.return_tokens_as_token_ids = self.options.return_tokens_as_token_ids
        engine = self.host.engine
        model = await self.host.find_model(body.model)
        asked = what_is_asked(body, model.name, engine.facts)
        how = submission(
            request, body, asked.params, prefix="cmpl", form=form_origin(body), lora_request=model.lora_request
        )
        if body.stream:
            return self.host.event_stream(request, self._stream(body, asked, how))
        async with Streams(engine, await prompts_of(body, asked, engine), how) as streams:
            outputs = await streams.last()
        return json_response(self._response(asked, how, outputs))

    async def _stream(self, body: CompletionRequest, asked: Asked, how: Submission) -> AsyncGenerator[bytes, None]:
        engine = self.host.engine
        writer = FrameWriter(self._head(asked, how), asked, body.stream_options, engine.token_texts)
        async with Streams(engine, await prompts_of(body, asked, engine), how) as streams:
            async for frame in writer.frames(streams.outputs()):
                yield frame

    def _response(self, asked: Asked, how: Submission, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for prompt_index, output in enumerate(outputs):
            for completion in output.outputs:
                index = prompt_index * asked.params.n + completion.index
                choice = ChoiceWriter(index, asked, self.host.engine.token_texts).write(output, completion)
                choices.append(choice.as_data())
        counts = usage_of(outputs)
        if asked.scores_only:
            counts = usage(counts["prompt_tokens"], 0, counts["prompt_tokens_details"]["cached_tokens"])
        return {**self._head(asked, how), "choices": choices, "usage": counts, **transfer_fields(outputs)}

    def _head(self, asked: Asked, how: Submission) -> dict[str, Any]:
        return {
            "id": how.response_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": system_fingerprint(self.host.engine.facts),
        }
