"""Runs an app on sockets: uvicorn with uvloop and httptools, and an end that lets requests finish."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from dovetail.contracts.errors import ConfigError
from dovetail.plugins.server.errors import unavailable
from dovetail.plugins.server.host import ServerHost
from dovetail.plugins.server.protocol import limited_protocol
from dovetail.plugins.server.settings import ServerSettings, TLSSettings

logger = logging.getLogger("dovetail.server")

_CLOSING_S = 5
"""For connections to close once their responses are complete or given up."""


class APIServer(uvicorn.Server):
    """One API process's server. `drain`, or a signal, ends it; a second signal ends it at once."""

    def __init__(self, app: ASGIApp, host: ServerHost, settings: ServerSettings):
        super().__init__(_uvicorn_config(app, settings))
        self._host = host
        self._drain_timeout_s = settings.drain_timeout_s
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def drain(self) -> None:
        """Takes no new requests, waits for those under way, and ends. Call it in the event loop; idempotent."""
        if self._draining is None:
            self._host.is_draining = True
            self._draining = asyncio.create_task(self._drain())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn calls it for SIGINT and SIGTERM."""
        if self._loop is None or self._host.is_draining:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self.drain)

    async def _drain(self) -> None:
        under_way = self._host.under_way
        logger.info("draining: %d requests are under way", len(under_way))
        deadline = asyncio.get_running_loop().time() + self._drain_timeout_s
        while under_way and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        for exchange in list(under_way):
            exchange.interrupt(unavailable("this server is shutting down, and the request took too long for that"))
        self.should_exit = True


def check_tls(tls: TLSSettings) -> None:
    """Raises `ConfigError` for files and ciphers that HTTPS cannot be served with."""
    for key, path in (("certfile", tls.certfile), ("keyfile", tls.keyfile), ("ca_certs", tls.ca_certs)):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"server.tls.{key}: there is no file {path}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certfile, tls.keyfile)
        if tls.ca_certs is not None:
            context.load_verify_locations(tls.ca_certs)
        if tls.ciphers is not None:
            context.set_ciphers(tls.ciphers)
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(path for path in (tls.certfile, tls.keyfile, tls.ca_certs) if path is not None)
        raise ConfigError(
            f"server.tls cannot be used: {error} ({files}): certfile is a certificate in PEM, keyfile its private key"
            " without a password, ca_certs certificates, ciphers a list as `openssl ciphers` takes it"
        ) from error


def listen(settings: ServerSettings) -> socket.socket:
    """A socket that listens where the settings say; API processes share it. Raises `ConfigError` for an address that
    cannot be had."""
    try:
        if settings.uds is not None:
            return _listen_unix(Path(settings.uds))
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"the server cannot listen on {settings.url}: {error.strerror or error}; set server.host, server.port or"
            " server.uds to an address that is free"
        ) from error


def _listen_unix(path: Path) -> socket.socket:
    _remove_dead(path)
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(str(path))
    except OSError:
        server.close()
        raise
    server.listen(2048)
    return server


def _remove_dead(path: Path) -> None:
    """Removes the socket of a server that ended; one that answers stays, and `bind` fails."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def run(app: ASGIApp, host: ServerHost, settings: ServerSettings, sockets: Sequence[socket.socket]) -> None:
    """Serves until a signal, in this thread. Requests under way get `drain_timeout_s` to finish."""
    APIServer(app, host, settings).run(sockets=list(sockets))


def _uvicorn_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    tls = settings.tls
    return uvicorn.Config(
        app,
        http=limited_protocol(settings.header_timeout_s),
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_level=settings.log_level,
        log_config=None,
        access_log=settings.access_log,
        server_header=False,
        root_path=settings.root_path,
        timeout_keep_alive=settings.keep_alive_timeout_s,  # type: ignore[arg-type]  # it goes to loop.call_later
        timeout_graceful_shutdown=_CLOSING_S,
        ssl_certfile=tls.certfile if tls is not None else None,
        ssl_keyfile=tls.keyfile if tls is not None else None,
        ssl_ca_certs=tls.ca_certs if tls is not None else None,
        ssl_cert_reqs=tls.cert_reqs if tls is not None else 0,
        ssl_ciphers=tls.ciphers if tls is not None else None,
    )
