"""Dovetail as an application of Ray Serve: each of its replicas runs an engine, and serves what `dovetail serve` does.

    from dovetail.plugins.server.ray_serve import build_app

    app = build_app("engine.yaml", num_replicas=2, ray_actor_options={"num_gpus": 1})   # serve run my_module:app

Or without a module of one's own: `serve run dovetail.plugins.server.ray_serve:app config=engine.yaml`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI

from dovetail import EngineProcess, RemoteEngine
from dovetail.commands import Component, LayeredConfig, load_config, resolve_server
from dovetail.contracts.errors import ConfigError, PluginError, WorkerError
from dovetail.plugins.server.app import create_app, create_routes
from dovetail.plugins.server.host import ServerHost
from dovetail.plugins.server.preparation import prepared
from dovetail.plugins.server.settings import ServerSettings, server_settings

_DEFAULTS: Final[Mapping[str, Any]] = {
    "name": "Dovetail",
    # Serve's 5 would leave the engine nothing to batch: it has limits of its own (server.max_num_waiting).
    "max_ongoing_requests": 100_000,
    "health_check_period_s": 1.0,
}
_HTTP: Final = "http_options of serve.start"
_INSTEAD: Final[Mapping[str, str]] = {
    "host": _HTTP,
    "port": _HTTP,
    "uds": _HTTP,
    "tls": _HTTP,
    "header_timeout_s": _HTTP,
    "keep_alive_timeout_s": _HTTP,
    "root_path": "route_prefix of serve.run",
    "api_server_count": "num_replicas of the deployment",
    "data_parallel_size": "num_replicas of the deployment",
    "data_parallel_devices": "ray_actor_options of the deployment",
    "router": "request_router_config of the deployment",
    "retries": "request_router_config of the deployment",
    "restart": "health_check_period_s and max_constructor_retry_count of the deployment",
    "drain_timeout_s": "graceful_shutdown_timeout_s of the deployment",
    "log_level": "logging_config of serve.run",
    "access_log": "logging_config of serve.run",
}
"""Settings of the section `server` that Serve has in place of ours."""


def build_app(
    config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
    *,
    options: Iterable[str] = (),
    **deployment: Any,
) -> Any:
    """Returns a `ray.serve.Application`, for `serve.run`.

    Args:
        config: as of `LLM.from_config`. Its paths must lead to the same files on each machine of the cluster.
        options: "dotted.key=value".
        deployment: options of `ray.serve.deployment`: num_replicas, autoscaling_config, ray_actor_options, ... An
            engine has the CPUs and GPUs that `ray_actor_options` asks for.

    Raises `ConfigError` for what is refused, settings that Serve has in place of ours among it, and `PluginError` where
    Ray Serve is not installed.
    """
    layered = load_config(config, overrides=options)
    _check_section(layered)
    serve = _import_serve()
    server = resolve_server(layered)
    job = _Job(
        config=prepared(layered, server),
        settings=server_settings(server.section),
        model_names=tuple(server.section["served_model_name"]),
        routes=server.routes,
    )
    return serve.deployment(serve.ingress()(_Replica), **{**_DEFAULTS, **deployment}).bind(job)


def app(arguments: dict[str, Any]) -> Any:
    """`build_app` of these keywords, for `serve run` and for the config files of Serve."""
    return build_app(**arguments)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What each replica does. It pickles."""

    config: LayeredConfig
    settings: ServerSettings
    model_names: tuple[str, ...]
    routes: Mapping[str, Component]
    """By label."""


class _Replica:
    """One replica: an engine in a process of its own, which ends with it, and the app in this one. Serve replaces a
    replica whose engine ended."""

    def __init__(self, job: _Job):
        self._job = job
        import ray

        # For the executor `ray`, which would begin a cluster of its own on this machine.
        address = ray.get_runtime_context().gcs_address
        self._process = EngineProcess(job.config, environment={"RAY_ADDRESS": address})
        self._engine: RemoteEngine | None = None

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls it once, in the event loop of the requests."""
        job = self._job
        await asyncio.to_thread(self._process.wait)
        self._engine = await RemoteEngine.connect(self._process.address)
        host = ServerHost(self._engine, job.model_names, 1, job.settings.request_chat_templates, restarts_engine=True)
        return create_app(host, create_routes(job.routes, host), job.settings)

    async def check_health(self) -> None:
        """Serve calls it now and then, and replaces a replica where it raises."""
        if not self._process.is_alive:
            raise WorkerError("the engine's process ended")
        if self._engine is not None:
            await self._engine.check_health()

    def __del__(self) -> None:
        """Serve calls it where it ends a replica, once its requests are done."""
        self._process.stop()


def _check_section(layered: LayeredConfig) -> None:
    given = {path[1] for path in layered.origins if path[0] == "server" and len(path) > 1}
    for key in sorted(given & _INSTEAD.keys()):
        raise ConfigError(
            f"server.{key} ({layered.origin(('server', key))}) has no effect under Ray Serve: leave it out, and use"
            f" {_INSTEAD[key]}"
        )


def _import_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise PluginError(f"Ray Serve is not installed ({error}): pip install 'dovetail[ray-serve]'") from error
    return serve
