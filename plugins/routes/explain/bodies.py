"""Bodies of the endpoints that generate, taken as far as the engine: what `submit` would be called with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.requests import Request

from dovetail.contracts.prompts import Prompt
from dovetail.contracts.route import APIError, RouteHost, ServedModel
from dovetail.contracts.sampling import SamplingParams
from dovetail.plugins.routes.chat import request as chat
from dovetail.plugins.routes.completions import request as completions
from dovetail.plugins.routes.messages import request as messages
from dovetail.plugins.routes.responses import request as responses
from dovetail.plugins.server.bodies import BodyReader
from dovetail.plugins.server.sampling import SamplingFields
from dovetail.plugins.server.turns.tools import ToolSet
from dovetail.plugins.server.turns.turn import Turn, prepare

Names = Mapping[str, tuple[str, ...]]
"""Field of `SamplingParams` -> the body's fields that give it, where their names differ."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request that could be submitted."""

    model: ServedModel
    fields: Mapping[str, Any]
    """What the body gives; without nulls."""
    priority: int
    is_salted: bool
    prompts: Sequence[Prompt]
    params: SamplingParams
    """What the engine gets."""
    asked: SamplingParams
    """The same before the dialect added its own."""
    names: Names
    dialect: str | None = None
    """Name of the dialect that reads the answer; None: the text is returned as it is."""
    tools: ToolSet = field(default_factory=ToolSet)


Prepare = Callable[[Request], Awaitable[Prepared]]


class Preparer:
    """Reads the bodies of one API process."""

    def __init__(self, host: RouteHost):
        self._host = host
        self._completions = BodyReader(completions.CompletionRequest)
        self._chat = BodyReader(chat.ChatRequest)
        self._messages = BodyReader(messages.MessagesRequest)
        self._responses = BodyReader(responses.ResponsesRequest)

    async def completions(self, request: Request) -> Prepared:
        """Of /v1/completions. This and the following raise `APIError` as the endpoint does."""
        body = await self._completions.read(request)
        engine = self._host.engine
        model = await self._host.find_model(body.model)
        asked = completions.what_is_asked(body, model.name, engine.facts)
        return Prepared(
            model=model,
            fields=await _given(request),
            priority=body.priority or 0,
            is_salted=body.cache_salt is not None,
            prompts=await completions.prompts_of(body, asked, engine),
            params=asked.params,
            asked=asked.params,
            names={"prompt_logprobs": ("prompt_logprobs", "echo")},
        )

    async def chat(self, request: Request) -> Prepared:
        """Of /v1/chat/completions."""
        body = await self._chat.read(request)
        model = await self._host.find_model(body.model)
        asked = chat.what_is_asked(body, model.name, self._host.engine.facts)
        names = {"max_tokens": ("max_completion_tokens", "max_tokens")}
        return await self._turn(request, body, model, asked.turn, asked.params, names)

    async def messages(self, request: Request) -> Prepared:
        """Of /v1/messages."""
        body = await self._messages.read(request)
        model = await self._host.find_model(body.model)
        asked = messages.what_is_asked(body, model.name, self._host.engine.facts)
        return await self._turn(request, body, model, asked.turn, asked.params, {"stop": ("stop_sequences",)})

    async def responses(self, request: Request) -> Prepared:
        """Of /v1/responses. Raises `APIError` 400 for `previous_response_id`: another route keeps the responses."""
        body = await self._responses.read(request)
        if body.previous_response_id is not None:
            message = "previous_response_id cannot be explained: earlier responses are kept elsewhere; give all items"
            raise APIError(400, message, param="previous_response_id")
        model = await self._host.find_model(body.model)
        asked = responses.what_is_asked(body, model.name, self._host.engine.facts, [])
        names = {"max_tokens": ("max_output_tokens",)}
        return await self._turn(request, body, model, asked.turn, asked.params, names)

    async def _turn(
        self,
        request: Request,
        body: SamplingFields,
        model: ServedModel,
        turn: Turn,
        asked: SamplingParams,
        names: Names,
    ) -> Prepared:
        prepared = await prepare(self._host, turn, asked)
        dialect = self._host.engine.facts.dialect
        return Prepared(
            model=model,
            fields=await _given(request),
            priority=body.priority or 0,
            is_salted=body.cache_salt is not None,
            prompts=[prepared.prompt],
            params=prepared.params,
            asked=asked,
            names=names,
            dialect=dialect.name if dialect is not None else None,
            tools=turn.tools,
        )


async def _given(request: Request) -> Mapping[str, Any]:
    """The fields of a body that was read and is right."""
    return {name: value for name, value in orjson.loads(await request.body()).items() if value is not None}
