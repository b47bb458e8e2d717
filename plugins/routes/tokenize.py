"""Route `tokenize`: text to token ids and back, in vLLM's shape."""

from __future__ import annotations

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route, RouteHost
from dovetail.plugins.server.bodies import Body, BodyReader, body_schema


class TokenizeRequest(Body, kw_only=True):
    """Body of /tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(Body, kw_only=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


class TokenizeRoute(Route):
    """POST /tokenize and /detokenize."""

    contract = (1, 0)

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
        self.host.check_model(asked.model)
        engine = self.host.engine
        ids = await engine.tokenize(asked.prompt, add_special_tokens=asked.add_special_tokens)
        texts = engine.token_texts(ids) if asked.return_token_strs else None
        content = {"count": len(ids), "max_model_len": engine.facts.max_model_len, "tokens": ids, "token_strs": texts}
        return Response(orjson.dumps(content), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special ones included."""
        asked = await self._to_detokenize.read(request)
        self.host.check_model(asked.model)
        text = await self.host.engine.detokenize(asked.tokens, skip_special_tokens=False)
        return Response(orjson.dumps({"prompt": text}), media_type="application/json")
