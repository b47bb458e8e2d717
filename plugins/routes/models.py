"""Route `models`: which models are served."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from dovetail.contracts.lora import LoadedLoRA
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import Route, RouteHost


class ModelsOptions(PluginOptions):
    """What is shown of adapters."""

    parents: dict[str, str] = Field(
        default_factory=dict,
        description="What is shown as `parent` of adapters: name -> model; of others it is the first name of the model",
    )


class ModelsRoute(Route):
    """GET /v1/models and /v1/models/NAME."""

    contract = (1, 2)
    Options = ModelsOptions
    options: ModelsOptions

    def __init__(self, options: ModelsOptions, host: RouteHost):
        super().__init__(options, host)
        self._created = int(time.time())

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["models"])
        router.get("/v1/models")(self.list_models)
        router.get("/v1/models/{name:path}")(self.show_model)
        return router

    async def list_models(self) -> dict[str, Any]:
        """Every name under which the model is served, and the adapters that are loaded."""
        cards = [self._card(name) for name in self.host.model_names]
        return {"object": "list", "data": [*cards, *(self._adapter_card(each) for each in await self._adapters())]}

    async def show_model(self, name: str) -> dict[str, Any]:
        """One of them."""
        if name not in self.host.model_names:
            for adapter in await self._adapters():
                if adapter.name == name:
                    return self._adapter_card(adapter)
            await self.host.find_model(name)  # raises; or the adapter came or went meanwhile
        return self._card(self.host.check_model(name))

    async def _adapters(self) -> list[LoadedLoRA]:
        engine = self.host.engine
        return await engine.list_loras() if engine.facts.max_loras else []

    def _adapter_card(self, adapter: LoadedLoRA) -> dict[str, Any]:
        parent = self.options.parents.get(adapter.name, self.host.model_names[0])
        return {**self._card(adapter.name), "root": adapter.path, "parent": parent}

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
