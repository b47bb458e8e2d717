from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from dovetail.contracts.dialect import Dialect
from dovetail.contracts.engine_client import EngineClient
from dovetail.contracts.errors import DovetailError
from dovetail.contracts.lora import LoRARequest
from dovetail.contracts.plugin import Plugin, PluginOptions
from fastapi import APIRouter, Request
from starlette.responses import Response
from typing import Any, ClassVar, Protocol


class APIError(DovetailError):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ): ...
    status: int
    param: str | None
    code: str | None
    headers: ...


@dataclass(frozen=True)
class ServedModel:
    name: str
    lora_request: LoRARequest | None = None


class RouteHost(Protocol):
    @property
    def engine(self) -> EngineClient: ...
    @property
    def model_names(self) -> tuple[str, ...]: ...
    @property
    def dialect(self) -> Dialect: ...
    @property
    def num_api_processes(self) -> int: ...
    @property
    def request_chat_templates(self) -> bool: ...
    @property
    def is_draining(self) -> bool: ...
    def check_model(self, name: str | None) -> str: ...
    async def find_model(self, name: str | None) -> ServedModel: ...
    def event_stream(self, request: Request, frames: AsyncGenerator[bytes, None]) -> Response: ...


class Route(Plugin):
    open_paths: ClassVar[frozenset[str]] = frozenset()
    def __init__(self, options: PluginOptions, host: RouteHost): ...
    options: PluginOptions
    host: RouteHost
    @abstractmethod
    def router(self) -> APIRouter: ...
    async def close(self) -> None: ...

def json_error(error: APIError) -> dict[str, Any]: ...
def error_type(status: int) -> str: ...
