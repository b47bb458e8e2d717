"""Tells how a text goes on, whole or as a stream."""

from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dovetail.contracts.errors import RequestError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import APIError, Route, RouteHost
from dovetail.contracts.sampling import SamplingParams


class Options(PluginOptions):
    path: str = "/frozen"


class Frozen(Route):
    contract = (1, 0)
    Options = Options
    open_paths = frozenset({"/frozen/words"})

    def __init__(self, options: Options, host: RouteHost):
        super().__init__(options, host)
        self.is_closed = False

    def router(self) -> APIRouter:
        router = APIRouter()
        router.post(self.options.path)(self.go_on)
        router.get("/frozen/words")(self.words)
        return router

    async def words(self) -> dict[str, int]:
        return {"max_model_len": self.host.engine.facts.max_model_len}

    async def go_on(self, request: Request) -> Response:
        try:
            asked = await request.json()
        except (ValueError, RecursionError):
            raise RequestError("the body is no JSON") from None
        if not isinstance(asked, dict):
            raise RequestError("the body is a mapping")
        for name, value in asked.items():
            if name not in ("text", "model", "stream"):
                raise APIError(400, f"unknown field {name}", param=name)
            if not isinstance(value, bool if name == "stream" else str):
                raise APIError(400, f"{name} is of another type", param=name)
        if "text" not in asked:
            raise APIError(400, "text is missing", param="text")
        self.host.check_model(asked.get("model"))
        if asked.get("stream"):
            return self.host.event_stream(request, self.frames(asked["text"]))
        return JSONResponse({"text": "".join([text async for text in self.texts(asked["text"])])})

    async def frames(self, prompt: str) -> AsyncGenerator[bytes, None]:
        async for text in self.texts(prompt):
            yield b"data: " + repr(text).encode() + b"\n\n"
        yield b"data: end\n\n"

    async def texts(self, prompt: str) -> AsyncGenerator[str, None]:
        params = SamplingParams(temperature=0, max_tokens=64, output_kind="delta")
        stream = await self.host.engine.submit(prompt, params)
        try:
            async for output in stream:
                yield output.outputs[0].text
        finally:
            stream.close()

    async def close(self) -> None:
        self.is_closed = True
