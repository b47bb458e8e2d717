"""Route `models`: which models are served."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route, RouteHost


class ModelsRoute(Route):
    """GET /v1/models and /v1/models/NAME."""

    contract = (1, 0)

    def __init__(self, options: PluginOptions, host: RouteHost):
        super().__init__(options, host)
        self._created = int(time.time())

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["models"])
        router.get("/v1/models")(self.list_models)
        router.get("/v1/models/{name:path}")(self.show_model)
        return router

    async def list_models(self) -> dict[str, Any]:
        """Every name under which the model is served."""
        return {"object": "list", "data": [self._card(name) for name in self.host.model_names]}

    async def show_model(self, name: str) -> dict[str, Any]:
        """One of them."""
        return self._card(self.host.check_model(name))

    def _card(self, name: str) -> dict[str, Any]:
        facts = self.host.engine.facts
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "dovetail",
            "root": facts.model,
            "parent": None,
            "max_model_len": facts.max_model_len,
        }
