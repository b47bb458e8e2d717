"""Route `metrics`: what the engine counted, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from dovetail.contracts.route import Route


class MetricsRoute(Route):
    """GET /metrics. The engine's process counts and writes, so every API process shows the same."""

    contract = (1, 0)
    open_paths = frozenset({"/metrics"})

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["metrics"])
        router.get("/metrics")(self.metrics)
        return router

    async def metrics(self) -> Response:
        """The exposition, as the engine writes it."""
        exposition = await self.host.engine.metrics()
        return Response(exposition.body, headers={"content-type": exposition.content_type})
