"""`dovetail serve`: a model over HTTP, with OpenAI's endpoints."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import typer

from dovetail.commands import LayeredConfig, create_console, resolve_server, takes_model_or_config
from dovetail.contracts.command import Command
from dovetail.plugins.server.api import check_tls, listen
from dovetail.plugins.server.api_process import APIJob
from dovetail.plugins.server.preparation import prepared
from dovetail.plugins.server.replica_machine import replica_shares
from dovetail.plugins.server.settings import ServerSettings, server_settings
from dovetail.plugins.server.supervisor import RestartPolicy, Supervisor

app = typer.Typer(help="Serve a model over HTTP.", rich_markup_mode=None)

_EXAMPLES = """\b
Examples:
  dovetail serve                                            the default model, on 127.0.0.1:8000
  dovetail serve ./my-model --max-model-len 4096 --port 9000
  dovetail serve engine.yaml -o server.api_server_count=2
  dovetail serve ./my-model --data-parallel-size 2          two engines, each with all of the model
"""


class ServeCommand(Command):
    """Serve a model over HTTP."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def app(self) -> typer.Typer:
        return app


@app.command("serve", epilog=_EXAMPLES)
@takes_model_or_config
def serve(layered: LayeredConfig) -> None:
    """Serve a model over HTTP, with OpenAI's endpoints.

    The engine runs in a process of its own, or several replicas of it (server.data_parallel_size), and so do the API
    processes (server.api_server_count). SIGTERM or Ctrl-C
    lets requests under way finish (server.drain_timeout_s); a second one ends all at once.
    """
    server = resolve_server(layered)
    settings = server_settings(server.section)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    if settings.tls is not None:
        check_tls(settings.tls)
    section, device = server.section, layered.config.device
    shares = replica_shares(section["data_parallel_size"], section["data_parallel_devices"], device)
    listener = listen(settings)
    if settings.uds is None:
        settings = replace(settings, port=listener.getsockname()[1])
    layered = prepared(layered, server)
    restart = RestartPolicy(**server.section["restart"])

    def job(addresses: tuple[str, ...]) -> APIJob:
        return APIJob(
            engines=addresses,
            router=server.router,
            retries=server.section["retries"],
            settings=settings,
            model_names=tuple(server.section["served_model_name"]),
            routes=server.routes,
            num_api_processes=server.section["api_server_count"],
            restarts_engine=restart.policy != "never",
        )

    supervisor = Supervisor(
        layered,
        job,
        listener,
        num_api_processes=server.section["api_server_count"],
        shares=shares,
        restart=restart,
    )
    try:
        code = supervisor.run(lambda: _announce(layered, settings))
    finally:
        if settings.uds is not None:
            Path(settings.uds).unlink(missing_ok=True)
    raise typer.Exit(code)


def _announce(layered: LayeredConfig, settings: ServerSettings) -> None:
    console = create_console(stderr=True)
    console.print(f"serving {layered.config.model.path} at {settings.url}/v1 (Ctrl-C ends)", soft_wrap=True)
