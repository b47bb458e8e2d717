"""Route `metrics`: what the engine counted, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.route import APIError, Route


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
        """The exposition, as the engine writes it. 404 where no telemetry sink of its config counts."""
        try:
            exposition = await self.host.engine.metrics()
        except ConfigError as error:
            raise APIError(404, str(error)) from None
        return Response(exposition.body, headers={"content-type": exposition.content_type})
