"""What the suite of routes finds: each a change in a route that passes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import orjson
import pytest
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from dovetail.contracts.errors import DovetailError, QueueFull, RequestError, WorkerError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route, RouteHost
from dovetail.contracts.sampling import SamplingParams
from dovetail.plugins.routes.health import HealthRoute
from dovetail.plugins.server.bodies import Body, BodyReader
from dovetail.plugins.server.live import live_server
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.route_suite import GeneratingRouteSuite, RouteSuite


class Ask(Body, kw_only=True):
    prompt: str
    num_tokens: int
    model: str | None = None
    stream: bool = False


class TellRoute(Route):
    """A small route that is right: each fault changes one thing."""

    contract = (1, 0)

    def __init__(self, options: PluginOptions, host: RouteHost):
        super().__init__(options, host)
        self.bodies = BodyReader(Ask)

    def router(self) -> APIRouter:
        router = APIRouter()
        router.post("/tell")(self.tell)
        return router

    async def tell(self, request: Request) -> Response:
        ask = await self.read(request)
        self.host.check_model(ask.model)
        if ask.stream:
            return self.respond(request, self.frames(ask))
        texts = [text async for text in self.texts(ask)]
        return Response(orjson.dumps({"text": "".join(texts)}), media_type="application/json")

    async def read(self, request: Request) -> Ask:
        return await self.bodies.read(request)

    def respond(self, request: Request, frames: AsyncGenerator[bytes, None]) -> Response:
        return self.host.event_stream(request, frames)

    async def frames(self, ask: Ask) -> AsyncGenerator[bytes, None]:
        async for text in self.texts(ask):
            yield b"data: " + orjson.dumps(text) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def texts(self, ask: Ask) -> AsyncGenerator[str, None]:
        params = SamplingParams(temperature=0, max_tokens=ask.num_tokens, output_kind="delta")
        stream = await self.host.engine.submit(ask.prompt, params)
        try:
            async for output in stream:
                yield output.outputs[0].text
        finally:
            stream.close()


class ForgetsToClose(TellRoute):
    async def texts(self, ask: Ask) -> AsyncGenerator[str, None]:
        params = SamplingParams(temperature=0, max_tokens=ask.num_tokens, output_kind="delta")
        async for output in await self.host.engine.submit(ask.prompt, params):
            yield output.outputs[0].text


class OutlivesItsClient(TellRoute):
    """Goes on in a task of its own, which nobody cancels."""

    def __init__(self, options: PluginOptions, host: RouteHost):
        super().__init__(options, host)
        self.tasks: set[asyncio.Task[str]] = set()

    async def texts(self, ask: Ask) -> AsyncGenerator[str, None]:
        async def collect() -> str:
            return "".join([text async for text in TellRoute.texts(self, ask)])

        task = asyncio.create_task(collect())
        self.tasks.add(task)
        yield await asyncio.shield(task)


class StatusFirst(TellRoute):
    def respond(self, request: Request, frames: AsyncGenerator[bytes, None]) -> Response:
        async def after_a_comment() -> AsyncGenerator[bytes, None]:
            yield b": hello\n\n"
            async for frame in frames:
                yield frame

        return self.host.event_stream(request, after_a_comment())


class StreamsByItself(TellRoute):
    """A response that knows nothing of errors."""

    def respond(self, request: Request, frames: AsyncGenerator[bytes, None]) -> Response:
        async def until_an_error() -> AsyncGenerator[bytes, None]:
            try:
                async for frame in frames:
                    yield frame
            except DovetailError:
                yield b"data: [DONE]\n\n"

        return StreamingResponse(until_an_error(), media_type="text/event-stream")


class FramesAhead(TellRoute):
    """Makes frames whether or not they can be sent."""

    async def frames(self, ask: Ask) -> AsyncGenerator[bytes, None]:
        queue: asyncio.Queue[bytes | BaseException] = asyncio.Queue()

        async def fill() -> None:
            async for text in self.texts(ask):
                for letter in text:  # many, however many tokens came at once
                    queue.put_nowait(b"data: " + orjson.dumps(letter) + b"\n\n")
            queue.put_nowait(b"data: [DONE]\n\n")

        task = asyncio.create_task(fill())
        frame: Any = b""
        while not frame.endswith(b"[DONE]\n\n"):
            frame = await queue.get()
            yield frame
        await task


class IgnoresWhatItDoesNotKnow(TellRoute):
    async def read(self, request: Request) -> Ask:
        given = json.loads(await request.body())
        known = {name: value for name, value in given.items() if name in Ask.__struct_fields__}
        return self.bodies.decode(orjson.dumps(known))


class ReadsByHand(TellRoute):
    async def read(self, request: Request) -> Ask:
        return Ask(**json.loads(await request.body()))


class NamesNoField(TellRoute):
    async def read(self, request: Request) -> Ask:
        try:
            return await super().read(request)
        except DovetailError as error:
            raise RequestError(str(error)) from None


class AnyModel(TellRoute):
    async def read(self, request: Request) -> Ask:
        ask = await super().read(request)
        ask.model = None
        return ask


class CutsThePrompt(TellRoute):
    async def read(self, request: Request) -> Ask:
        ask = await super().read(request)
        ask.prompt = ask.prompt[:100]
        return ask


class RefusesWhatIsFull(TellRoute):
    async def texts(self, ask: Ask) -> AsyncGenerator[str, None]:
        try:
            async for text in super().texts(ask):
                yield text
        except QueueFull as error:
            raise RequestError(str(error)) from None


class BlamesTheClient(TellRoute):
    async def texts(self, ask: Ask) -> AsyncGenerator[str, None]:
        try:
            async for text in super().texts(ask):
                yield text
        except WorkerError as error:
            raise RequestError(str(error)) from None


class OpenToAll(TellRoute):
    open_paths = frozenset({"/tell"})


class OpensWhatIsNotThere(HealthRoute):
    open_paths = frozenset({"/healthy"})


class WithoutAnEndpoint(HealthRoute):
    open_paths = frozenset()

    def router(self) -> APIRouter:
        return APIRouter()


class OfAnotherContract(HealthRoute):
    contract = (2, 0)


class ImportsTorch(HealthRoute):
    __module__ = "dovetail.testing.story_model"


class BreaksOverABody(HealthRoute):
    def router(self) -> APIRouter:
        router = super().router()
        router.post("/bug")(self.bug)
        return router

    async def bug(self, request: Request) -> Any:
        return json.loads(await request.body())["a"]


class OneRouterForAll(HealthRoute):
    """Has something that only one object can have."""

    is_mounted = False

    def router(self) -> APIRouter:
        assert not OneRouterForAll.is_mounted
        OneRouterForAll.is_mounted = True
        return super().router()


BEFORE = "test_a_client_that_leaves_before_the_first_token"
BETWEEN = "test_a_client_that_leaves_between_two_frames"
DIES_LATER = "test_an_engine_that_dies_ends_the_stream_with_an_error"
DIES_FIRST = "test_an_engine_that_dies_first_is_a_503"

GENERATING = [
    Fault("leaves a stream open when its client leaves early", OutlivesItsClient, f"{BEFORE}[whole]"),
    Fault("leaves a stream open when its client leaves", ForgetsToClose, BETWEEN),
    Fault("sends a status before the first token", StatusFirst, f"{DIES_FIRST}[stream]"),
    Fault(
        "calls a stream complete that failed", StreamsByItself, "test_an_engine_that_dies_ends_the_stream_with_an_error"
    ),
    Fault("makes frames that nobody reads", FramesAhead, "test_a_client_that_does_not_read_costs_no_memory"),
    Fault("ignores fields", IgnoresWhatItDoesNotKnow, "test_an_unknown_field_is_refused_by_name[whole]"),
    Fault("does not look at types", ReadsByHand, "test_a_field_of_another_type_is_refused_by_name[whole]"),
    Fault("breaks over what is no JSON", ReadsByHand, "test_what_is_malformed_is_a_client_error"),
    Fault("does not say which field is wrong", NamesNoField, "test_a_field_of_another_type_is_refused_by_name[whole]"),
    Fault("serves any model", AnyModel, "test_a_model_that_is_not_served_is_a_404[whole]"),
    Fault("cuts prompts without a word", CutsThePrompt, "test_a_prompt_that_is_too_long_is_refused[whole]"),
    Fault("does not say when to try again", RefusesWhatIsFull, "test_a_full_queue_is_a_429[whole]"),
    Fault("blames clients for a dead engine", BlamesTheClient, f"{DIES_FIRST}[whole]"),
    Fault("stays open while the server drains", OpenToAll, "test_a_draining_server_refuses_it[whole]"),
]

ALL = [
    Fault("is of another contract", OfAnotherContract, "test_declares_its_contract"),
    Fault("imports torch", ImportsTorch, "test_needs_no_torch"),
    Fault("has no endpoint", WithoutAnEndpoint, "test_its_paths_are_in_the_openapi_document"),
    Fault("opens a path that it does not have", OpensWhatIsNotThere, "test_its_paths_are_in_the_openapi_document"),
    Fault("breaks over a body", BreaksOverABody, "test_what_is_malformed_is_a_client_error"),
    Fault("shares what each server needs", OneRouterForAll, "test_it_can_be_mounted_again"),
]


class TellSuite(GeneratingRouteSuite):
    serve = staticmethod(live_server)
    path = "/tell"

    def body(self, prompt: str, num_tokens: int) -> dict[str, Any]:
        return {"prompt": prompt, "num_tokens": num_tokens}


@pytest.mark.parametrize("fault", GENERATING, ids=str)
def test_the_suite_finds_a_generating_route_that(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.testing.route_suite.PATIENCE_S", 2.0)
    check_fault(fault, TellSuite, plugin=fault.plugin)


@pytest.mark.parametrize("fault", ALL, ids=str)
def test_the_suite_finds_a_route_that(fault: Fault) -> None:
    check_fault(fault, RouteSuite, plugin=fault.plugin, serve=staticmethod(live_server))


class TestTheRouteThatIsRight(TellSuite):
    plugin = TellRoute
    test_needs_no_torch = None  # this module needs it
