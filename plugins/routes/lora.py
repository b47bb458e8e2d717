"""Route `lora`: adapters are loaded and unloaded while the server runs, with vLLM's endpoints."""

from __future__ import annotations

import logging

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from dovetail.contracts.lora import LoadedLoRA, LoRARequest
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.route import APIError, Route, RouteHost
from dovetail.plugins.server.bodies import Body, BodyReader, body_schema

logger = logging.getLogger("dovetail.server")


class LoRAOptions(PluginOptions):
    """Who may change which adapters are loaded."""

    allow_updates: bool = Field(
        default=False,
        description="Clients may load adapters, from any folder that the engine can read, and unload them",
    )


class LoadRequest(Body, kw_only=True):
    """Body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str


class UnloadRequest(Body, kw_only=True):
    """Body of /v1/unload_lora_adapter: a name, a number or both."""

    lora_name: str | None = None
    lora_int_id: int | None = None


class LoRARoute(Route):
    """POST /v1/load_lora_adapter and /v1/unload_lora_adapter."""

    contract = (1, 2)
    Options = LoRAOptions
    options: LoRAOptions

    def __init__(self, options: LoRAOptions, host: RouteHost):
        super().__init__(options, host)
        self._to_load = BodyReader(LoadRequest)
        self._to_unload = BodyReader(UnloadRequest)

    def router(self) -> APIRouter:
        """See `Route.router`."""
        router = APIRouter(tags=["lora"])
        router.post("/v1/load_lora_adapter", openapi_extra=body_schema(LoadRequest))(self.load)
        router.post("/v1/unload_lora_adapter", openapi_extra=body_schema(UnloadRequest))(self.unload)
        return router

    async def load(self, request: Request) -> Response:
        """Reads an adapter and checks it; requests may name it once this has answered."""
        self._check_allowed()
        asked = await self._to_load.read(request)
        name = asked.lora_name
        if not asked.lora_path:
            raise APIError(400, "lora_path is empty: give a folder with PEFT's files", param="lora_path")
        if name in self.host.model_names:
            message = f"the name {name!r} is that of the model itself: give the adapter another"
            raise APIError(409, message, param="lora_name")
        wanted = LoRARequest(name, 0, asked.lora_path)
        loaded = next((each for each in await self.host.engine.list_loras() if each.name == name), None)
        if loaded is not None:
            message = (
                f"an adapter {name!r} is loaded already, from {loaded.path}: unload it first, or take another name"
            )
            raise APIError(409, message, param="lora_name")
        added = await self.host.engine.add_lora(wanted)
        logger.info("adapter %r is loaded from %s", name, added.path)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Forgets an adapter that no request uses."""
        self._check_allowed()
        asked = await self._to_unload.read(request)
        found = await self._find(asked)
        await self.host.engine.remove_lora(found.name)
        logger.info("adapter %r is unloaded", found.name)
        return PlainTextResponse(f"Success: LoRA adapter '{found.name}' removed successfully.")

    def _check_allowed(self) -> None:
        if not self.options.allow_updates:
            raise APIError(
                403,
                "this server loads and unloads no adapters while it runs: whoever starts it can allow that"
                " (server.routes.lora.allow_updates: true), or name adapters for the start (--lora-modules)",
            )
        if not self.host.engine.facts.max_loras:
            raise APIError(400, "this server serves no adapters: start it with lora.enabled (--enable-lora)")

    async def _find(self, asked: UnloadRequest) -> LoadedLoRA:
        if asked.lora_name is None and asked.lora_int_id is None:
            raise APIError(400, "give lora_name, or lora_int_id", param="lora_name")
        loaded = await self.host.engine.list_loras()
        for each in loaded:
            if asked.lora_name in (None, each.name) and asked.lora_int_id in (None, each.int_id):
                return each
        wanted = " and ".join(
            f"{field} {value!r}"
            for field, value in (("lora_name", asked.lora_name), ("lora_int_id", asked.lora_int_id))
            if value is not None
        )
        there = ", ".join(f"{each.name} ({each.int_id})" for each in loaded) or "none"
        param = "lora_name" if asked.lora_name is not None else "lora_int_id"
        raise APIError(404, f"no adapter has {wanted}; loaded are: {there}", param=param)
