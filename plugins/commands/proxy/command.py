"""The options of `dovetail proxy`."""

from __future__ import annotations

import logging
import socket
from typing import Annotated, ClassVar

import typer
import uvicorn

from dovetail.commands import create_console
from dovetail.commands.checks import require
from dovetail.commands.http import create_client, parse_base_url
from dovetail.contracts.command import Command
from dovetail.contracts.errors import ConfigError
from dovetail.plugins.commands.proxy.forwarding import Proxy
from dovetail.plugins.commands.proxy.servers import Servers

app = typer.Typer(help="Prefill on some servers, decode on others.", rich_markup_mode=None)

_CLOSING_S = 5
"""For requests under way once the proxy is asked to end."""


class ProxyCommand(Command):
    """Prefill on some servers, decode on others."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def app(self) -> typer.Typer:
        return app


@app.command("proxy")
def proxy(
    prefill: Annotated[
        list[str],
        typer.Option("--prefill", metavar="URL", help="A server with a producer. Repeat for more."),
    ],
    decode: Annotated[
        list[str], typer.Option("--decode", metavar="URL", help="A server with a consumer. Repeat for more.")
    ],
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen at.")] = 8000,
    prefill_timeout: Annotated[
        float, typer.Option("--prefill-timeout", help="Longest that a prefill server may take, in seconds.")
    ] = 60.0,
) -> None:
    """Prefill on some servers, decode on others.

    Requests to /v1/completions and /v1/chat/completions go to a prefill server for one token, and then, with its
    kv_transfer_params, to a decode server, which fetches the prompt's KV blocks. Both kinds are asked in turns.
    """
    require(prefill_timeout > 0, f"--prefill-timeout {prefill_timeout}: give a number of seconds more than 0")
    forwards = Proxy(
        Servers([parse_base_url("--prefill", url) for url in prefill]),
        Servers([parse_base_url("--decode", url) for url in decode]),
        create_client(),
        prefill_timeout,
    )
    listener = _listen(host, port)
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("httpx").setLevel("WARNING")
    create_console(stderr=True).print(f"proxy at http://{host}:{port}/v1 (Ctrl-C ends)", soft_wrap=True)
    settings = uvicorn.Config(forwards.app(), log_config=None, access_log=False, timeout_graceful_shutdown=_CLOSING_S)
    uvicorn.Server(settings).run([listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"the proxy cannot listen on {host}:{port}: {error.strerror or error}; give --host and --port an address"
            " that is free"
        ) from error
