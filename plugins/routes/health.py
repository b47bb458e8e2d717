"""Route `health`: whether the server lives, and whether to send requests to it."""

from __future__ import annotations

from importlib import metadata

from fastapi import APIRouter
from starlette.responses import Response

from dovetail.contracts.route import APIError, Route

_RETRY = {"retry-after": "5"}


class HealthRoute(Route):
    """/health and /ping ask the engine, /ready also whether requests are taken, /live nobody; /version."""

    contract = (1, 0)
    open_paths = frozenset({"/health", "/ping", "/ready", "/live", "/version"})

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["health"])
        router.get("/health")(self.health)
        router.get("/ping")(self.health)
        router.post("/ping")(self.health)
        router.get("/ready")(self.ready)
        router.get("/live")(self.live)
        router.get("/version")(self.version)
        return router

    async def health(self) -> Response:
        """200 where the engine answers, 503 where it died."""
        await self.host.engine.check_health()
        return Response()

    async def ready(self) -> Response:
        """200 where requests are taken, 503 where the engine died or the server drains."""
        if self.host.is_draining:
            raise APIError(503, "this server is shutting down", headers=_RETRY)
        return await self.health()

    async def live(self) -> Response:
        """200: this process answers."""
        return Response()

    async def version(self) -> dict[str, str]:
        """Dovetail's version."""
        return {"version": metadata.version("dovetail")}
