"""Route `tokenize`: text to token ids and back, in vLLM's shape."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.prompts import PrefixVerdict
from dovetail.contracts.route import APIError, Route, RouteHost
from dovetail.plugins.routes.chat.request import ChatRequest, turn_of
from dovetail.plugins.server.bodies import Body, BodyReader, body_schema, json_response
from dovetail.plugins.server.turns.messages import Messages
from dovetail.plugins.server.turns.prefix import prefix_fields
from dovetail.plugins.server.turns.tools import Tools
from dovetail.plugins.server.turns.turn import render

_OF_CHAT = (
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "required_prefix_token_ids",
    "keep_rewritten",
)


class TokenizeRequest(Body, kw_only=True):
    """Body of /tokenize: a text, or a conversation as /v1/chat/completions takes it."""

    prompt: str | None = None
    messages: Messages | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    required_prefix_token_ids: list[int] | None = None
    keep_rewritten: bool | None = None


class DetokenizeRequest(Body, kw_only=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


class TokenizeRoute(Route):
    """POST /tokenize and /detokenize."""

    contract = (1, 8)

    def __init__(self, options: PluginOptions, host: RouteHost):
        super().__init__(options, host)
        self._to_tokenize = BodyReader(TokenizeRequest)
        self._to_detokenize = BodyReader(DetokenizeRequest)

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["tokenize"])
        router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))(self.tokenize)
        router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))(self.detokenize)
        return router

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text."""
        asked = await self._to_tokenize.read(request)
        await self.host.find_model(asked.model)
        engine = self.host.engine
        ids, prefix = await self._token_ids(asked)
        # In a thread, which lets streams go on between two texts.
        texts = await asyncio.to_thread(engine.token_texts, ids) if asked.return_token_strs else None
        content = {"count": len(ids), "max_model_len": engine.facts.max_model_len, "tokens": ids, "token_strs": texts}
        return json_response(content | prefix_fields(prefix))

    async def _token_ids(self, asked: TokenizeRequest) -> tuple[list[int], PrefixVerdict | None]:
        if (asked.prompt is None) == (asked.messages is None):
            raise APIError(400, "give a prompt or messages, one of them", param="prompt")
        chat = {name: value for name in _OF_CHAT if (value := msgspec.structs.asdict(asked)[name]) is not None}
        if asked.prompt is not None:
            if chat:
                raise APIError(400, f"{min(chat)} is for messages, and this is a prompt", param=min(chat))
            with_special = asked.add_special_tokens is not False
            return await self.host.engine.tokenize(asked.prompt, add_special_tokens=with_special), None
        if asked.add_special_tokens:
            message = "add_special_tokens is for prompts: the chat template writes the special tokens"
            raise APIError(400, message, param="add_special_tokens")
        rendered = await render(self.host, turn_of(ChatRequest(messages=asked.messages or [], **chat)))
        return rendered.prompt["prompt_token_ids"], rendered.prefix

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special ones included."""
        asked = await self._to_detokenize.read(request)
        await self.host.find_model(asked.model)
        text = await self.host.engine.detokenize(asked.tokens, skip_special_tokens=False)
        return json_response({"prompt": text})
