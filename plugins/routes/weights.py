"""Route `weights`: a trainer gives a running server new weights, with vLLM's endpoints."""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from dovetail.contracts.errors import ModelError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.regions import RegionState
from dovetail.contracts.route import APIError, Route, RouteHost
from dovetail.plugins.server.bodies import Body, BodyReader, body_schema, json_response

logger = logging.getLogger("dovetail.server")

Value = TypeVar("Value")
Asked = TypeVar("Asked", bound=Body)


class WeightsOptions(PluginOptions):
    """Who may change the weights."""

    allow_updates: bool = Field(
        default=False,
        description="Clients may replace the model's weights, also by those of any checkpoint that the engine can read",
    )


class InitRequest(Body, kw_only=True):
    """Body of /init_weight_transfer_engine."""

    init_info: dict[str, Any] | None = None


class StartRequest(Body, kw_only=True):
    """Body of /start_weight_update, which may be left out."""

    is_checkpoint_format: bool = True
    weight_version: int | None = None
    partial: bool = False


class UpdateRequest(Body, kw_only=True):
    """Body of /update_weights."""

    update_info: dict[str, Any]
    drafter: str | None = None


class FinishRequest(Body, kw_only=True):
    """Body of /finish_weight_update, which may be left out."""

    weight_version: Any = None


class WeightsRoute(Route):
    """POST /init_weight_transfer_engine, /start_weight_update, /update_weights, /finish_weight_update and
    /abort_weight_update; GET /weight_info and /get_world_size."""

    contract = (1, 8)
    Options = WeightsOptions
    options: WeightsOptions

    def __init__(self, options: WeightsOptions, host: RouteHost):
        super().__init__(options, host)
        self._to_init = BodyReader(InitRequest)
        self._to_start = BodyReader(StartRequest)
        self._to_update = BodyReader(UpdateRequest)
        self._to_finish = BodyReader(FinishRequest)

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["weights"])
        router.post("/init_weight_transfer_engine", openapi_extra=_optional(InitRequest))(self.init)
        router.post("/start_weight_update", openapi_extra=_optional(StartRequest))(self.start)
        router.post("/update_weights", openapi_extra=body_schema(UpdateRequest))(self.update)
        router.post("/finish_weight_update", openapi_extra=_optional(FinishRequest))(self.finish)
        router.post("/abort_weight_update")(self.abort)
        router.get("/weight_info")(self.weight_info)
        router.get("/get_world_size")(self.world_size)
        return router

    async def init(self, request: Request) -> Response:
        """Connects the config's weight_transport to the trainer; once for any number of updates."""
        self._check_allowed()
        asked = await _read(request, self._to_init, InitRequest())
        try:
            await self.host.engine.init_weight_transfer_engine(asked.init_info)
        except ModelError as error:
            raise APIError(400, str(error), param="init_info") from None
        return await self._answer("Weight transfer initialized")

    async def start(self, request: Request) -> Response:
        """Begins an update. Answers with the version that it will have, and the weights that the engine has."""
        self._check_allowed()
        asked = await _read(request, self._to_start, StartRequest())
        version = await self.host.engine.start_weight_update(
            asked.is_checkpoint_format, weight_version=asked.weight_version, partial=asked.partial
        )
        return await self._answer("Weight update started", next_weight_version=version)

    async def update(self, request: Request) -> Response:
        """Receives one bucket; answers once the trainer may send the next."""
        self._check_allowed()
        asked = await self._to_update.read(request)
        await self._in_update(self.host.engine.update_weights(asked.update_info, drafter=asked.drafter))
        return await self._answer("Weights updated")

    async def finish(self, request: Request) -> Response:
        """Writes the weights where all of them came and fit. Answers with their version and checksum."""
        self._check_allowed()
        asked = await _read(request, self._to_finish, FinishRequest())
        if asked.weight_version is not None:
            raise APIError(
                400,
                "/start_weight_update takes the weight_version: an integer above the present one",
                param="weight_version",
            )
        report = await self._in_update(self.host.engine.finish_weight_update())
        logger.info("the weights have version %d (%s)", report.version, report.checksum)
        return await self._answer("Weight update finished")

    async def abort(self) -> Response:
        """Ends an update that is under way, if there is one; the old weights serve on."""
        self._check_allowed()
        await self.host.engine.abort_weight_update()
        return await self._answer("Weight update aborted")

    async def weight_info(self) -> Response:
        """Version and checksum of the weights that the engine has."""
        return json_response(await self._weights())

    async def world_size(self) -> Response:
        """How many workers receive weights. There is one engine, so `include_dp` of vLLM makes no difference."""
        return json_response({"world_size": self.host.engine.facts.num_workers})

    async def _answer(self, message: str, **more: int) -> Response:
        return json_response({"message": message, **more, **await self._weights()})

    async def _weights(self) -> dict[str, Any]:
        report = await self.host.engine.weights()
        return {"weight_version": report.version, "weight_checksum": report.checksum}

    async def _in_update(self, call: Awaitable[Value]) -> Value:
        """What fails for the weights that came is the trainer's affair."""
        try:
            return await call
        except ModelError as error:
            raise APIError(400, f"{error}. {await self._after_failure()}") from None

    async def _after_failure(self) -> str:
        broken = [one.name for one in await self.host.engine.regions() if one.state is RegionState.INVALID]
        if broken:
            return f"Invalid now: {', '.join(broken)}. Requests are refused until an update of all weights."
        return "The update has ended, and the old weights serve on."

    def _check_allowed(self) -> None:
        if not self.options.allow_updates:
            raise APIError(
                403,
                "clients may not change this server's weights: whoever starts it can allow that"
                " (server.routes.weights.allow_updates: true)",
            )


async def _read(request: Request, reader: BodyReader[Asked], default: Asked) -> Asked:
    """The body, or `default` where there is none: vLLM's clients send none where they have nothing to say."""
    return await reader.read(request) if await request.body() else default


def _optional(kind: type[Body]) -> dict[str, Any]:
    schema = body_schema(kind)
    return {"requestBody": {**schema["requestBody"], "required": False}}
