"""Route `pause`: an engine is paused and resumed, sleeps and wakes up while its server runs, with vLLM's endpoints."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import JSONResponse, Response

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.pausing import as_pause_mode
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import APIError, Route

logger = logging.getLogger("dovetail.server")


class PauseOptions(PluginOptions):
    """Who may pause the engine."""

    allow_control: bool = Field(
        default=False,
        description="Clients may pause the engine, which can end the requests of others, and have it sleep",
    )


class PauseRoute(Route):
    """POST /pause, /resume, /sleep and /wake_up; GET /is_paused and /is_sleeping."""

    contract = (1, 8)
    Options = PauseOptions
    options: PauseOptions

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["pause"])
        router.post("/pause")(self.pause)
        router.post("/resume")(self.resume)
        router.post("/sleep")(self.sleep)
        router.post("/wake_up")(self.wake_up)
        router.get("/is_paused")(self.is_paused)
        router.get("/is_sleeping")(self.is_sleeping)
        return router

    async def pause(self, mode: str = "abort") -> Response:
        """Answers once nothing is computed: requests ended (abort), ran to their ends (wait) or are held (keep)."""
        self._check_allowed()
        await self.host.engine.pause(as_pause_mode(mode))
        logger.info("the engine is paused (%s)", mode)
        return JSONResponse({"status": "paused"})

    async def resume(self) -> Response:
        """Requests that were held go on."""
        self._check_allowed()
        await self.host.engine.resume()
        logger.info("the engine goes on")
        return JSONResponse({"status": "resumed"})

    async def sleep(
        self,
        level: int = 1,
        tags: list[str] | None = Query(default=None),  # noqa: B008 (FastAPI's way)
        mode: str | None = None,
    ) -> Response:
        """Gives memory back while nothing runs; what a pause holds is computed again."""
        self._check_allowed()
        if mode is not None:
            raise APIError(
                400, "sleep takes no mode: POST /pause?mode=... first, and /resume after /wake_up", param="mode"
            )
        try:
            await self.host.engine.sleep(level, tags)
        except ConfigError as error:
            raise APIError(400, str(error), param="level") from None
        logger.info("the engine sleeps at level %d", level)
        return Response()

    async def wake_up(
        self,
        tags: list[str] | None = Query(default=None),  # noqa: B008 (FastAPI's way)
        new_weights: bool = False,
        for_update: bool = False,
    ) -> Response:
        """Takes memory again. After level 2 `new_weights` takes whatever checkpoint is there, and `for_update` reads
        none, since an update brings the weights."""
        self._check_allowed()
        await self.host.engine.wake_up(tags, new_weights=new_weights, for_update=for_update)
        logger.info("the engine is awake")
        return Response()

    async def is_paused(self) -> Response:
        """Whether requests are held until /resume."""
        return JSONResponse({"is_paused": await self.host.engine.is_paused()})

    async def is_sleeping(self) -> Response:
        """Whether /wake_up must come before requests, and the state of each region."""
        engine = self.host.engine
        regions = {one.name: one.state.value for one in await engine.regions()}
        return JSONResponse({"is_sleeping": await engine.is_sleeping(), "regions": regions})

    def _check_allowed(self) -> None:
        if not self.options.allow_control:
            raise APIError(
                403,
                "clients may not pause this server's engine, or have it sleep: whoever starts it can allow that"
                " (server.routes.pause.allow_control: true)",
            )
