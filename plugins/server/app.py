"""The app: routes mounted, with what is checked before any of them runs."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import get_type_hints

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from dovetail.commands import Component, create_class
from dovetail.contracts.errors import ConfigError, DovetailError, PluginError
from dovetail.contracts.route import Route
from dovetail.plugins.server.auth import APIKeys
from dovetail.plugins.server.draining import Draining
from dovetail.plugins.server.errors import on_http_exception, on_validation_error
from dovetail.plugins.server.exchange import Exchanges
from dovetail.plugins.server.heads import Heads
from dovetail.plugins.server.host import ServerHost
from dovetail.plugins.server.limits import BodyLimits
from dovetail.plugins.server.request_ids import HEADER
from dovetail.plugins.server.settings import CORSSettings, ServerSettings

_DOCS = ("/docs", "/openapi.json")


def create_app(host: ServerHost, routes: Mapping[str, Route], settings: ServerSettings) -> FastAPI:
    """The app of one API process. `routes`: by their label in the config.

    Raises `ConfigError` for a path that two routes have. The app closes the routes when its lifespan ends.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        for route in routes.values():
            await route.close()

    app = FastAPI(
        title="Dovetail",
        docs_url=_DOCS[0] if settings.docs else None,
        openapi_url=_DOCS[1] if settings.docs else None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        middleware=_middleware(host, routes, settings),
        exception_handlers={HTTPException: on_http_exception, RequestValidationError: on_validation_error},
    )
    _mount(app, routes)
    return app


def create_routes(components: Mapping[str, Component], host: ServerHost) -> dict[str, Route]:
    """The routes of one API process, by label."""
    return {label: _create(label, component, host) for label, component in components.items()}


def _create(label: str, component: Component, host: ServerHost) -> Route:
    plugin, options = create_class(component)
    assert issubclass(plugin, Route)
    with names_route(label):
        return plugin(options, host)


@contextmanager
def names_route(label: str) -> Iterator[None]:
    """What a route raises while it is set up becomes a `PluginError` that names it, and where it was raised."""
    try:
        yield
    except DovetailError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise PluginError(
            f"route {label!r} cannot be set up: {type(error).__name__}: {error} ({place.filename}, line"
            f" {place.lineno}): mend it, or switch it off (server.routes.{label}: null)"
        ) from error


def _middleware(host: ServerHost, routes: Mapping[str, Route], settings: ServerSettings) -> list[Middleware]:
    """The outermost first. None derives from BaseHTTPMiddleware, which buffers streams and hides disconnects."""
    open_paths = frozenset(_DOCS).union(*(route.open_paths for route in routes.values()))
    exchanges = Middleware(
        Exchanges,
        under_way=host.under_way,
        timeout_s=settings.request_timeout_s,
        outage=host.outage,
    )
    return [
        *_cors(settings.cors),
        exchanges,
        Middleware(Heads),
        Middleware(APIKeys, keys=settings.api_keys, open_paths=open_paths),
        Middleware(Draining, host=host, open_paths=open_paths),
        Middleware(BodyLimits, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s),
    ]


def _cors(cors: CORSSettings) -> list[Middleware]:
    if not cors.allow_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=cors.allow_origins,
            allow_methods=cors.allow_methods,
            allow_headers=cors.allow_headers,
            allow_credentials=cors.allow_credentials,
            expose_headers=[HEADER.decode()],
        )
    ]


def _mount(app: FastAPI, routes: Mapping[str, Route]) -> None:
    owners: dict[tuple[str, str], str] = {("GET", path): "the server itself" for path in _DOCS}
    for label, route in routes.items():
        with names_route(label):
            router = route.router()
        for endpoint in router.routes:
            if not isinstance(endpoint, APIRoute):
                continue
            for method in endpoint.methods or ():
                owner = owners.setdefault((method, endpoint.path_format), f"route {label!r}")
                if owner != f"route {label!r}":
                    raise ConfigError(
                        f"{method} {endpoint.path} is an endpoint of route {label!r} and of {owner}:"
                        f" switch one off (server.routes.{label}: null)"
                    )
        for endpoint in router.routes:
            if isinstance(endpoint, APIRoute) and _takes_the_request_alone(endpoint):
                app.router.routes.append(
                    StarletteRoute(endpoint.path, endpoint.endpoint, methods=endpoint.methods, include_in_schema=False)
                )
            app.router.routes.append(endpoint)


def _takes_the_request_alone(route: APIRoute) -> bool:
    """Whether FastAPI has nothing to do for an endpoint but to call it, and Starlette can, which costs less."""
    if route.dependencies or route.dependant.dependencies:
        return False
    types = get_type_hints(route.endpoint)
    returned = types.pop("return", None)
    return [*types.values()] == [Request] and isinstance(returned, type) and issubclass(returned, Response)
