"""One request and its response, which shows the request's id. Whatever an endpoint raises becomes an error response, or
the last event of a stream; a client that leaves ends the endpoint, and so does the time limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.contracts.route import APIError
from dovetail.plugins.server.errors import ClientLeft, as_api_error, error_event, error_response, is_of_outage
from dovetail.plugins.server.request_ids import HEADER, assign_id, request_id

logger = logging.getLogger("dovetail.server")

_DISCONNECT: Message = {"type": "http.disconnect"}
_NO_BODY: Message = {"type": "http.request", "body": b"", "more_body": False}


class Exchange:
    """What is known of a request under way."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.scope = scope
        self.is_started = False
        """Whether the status was sent."""
        self.is_complete = False
        self.is_event_stream = False
        self.end: Exception | None = None
        """Why the endpoint was ended."""
        self._receive = receive
        self._send = send
        self._task = asyncio.current_task()
        self._gone = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        headers = {name for name, _ in scope["headers"]}
        self._owes_body = not headers & {b"content-length", b"transfer-encoding"}
        """There is no body, and whoever reads it was not told so yet: the watcher takes the server's own message."""
        if self._owes_body:
            self._watch()

    async def receive(self) -> Message:
        """The next part of the body; after it, "http.disconnect" once the client has left."""
        if self._owes_body:
            self._owes_body = False
            return _NO_BODY
        if self._watcher is not None:
            await self._gone.wait()
            return _DISCONNECT
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            self._watch()
        return message

    async def send(self, message: Message) -> None:
        """Passes a message on."""
        if not self.is_started:
            self.is_started = True
            headers = dict(message.get("headers", ()))
            self.is_event_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            message = {**message, "headers": [*message.get("headers", ()), (HEADER, request_id(self.scope).encode())]}
        elif not message.get("more_body"):
            self.is_complete = True
        await self._send(message)

    def interrupt(self, end: Exception) -> None:
        """Ends the endpoint; `end` becomes its response. Does nothing once the response is complete."""
        if self.end is None and not self.is_complete and self._task is not None:
            self.end = end
            self._task.cancel()

    def forgive(self) -> None:
        """The cancellation was `interrupt`'s, and is dealt with."""
        if self._task is not None:
            self._task.uncancel()

    def close(self) -> None:
        """Nothing is awaited any more."""
        if self._watcher is not None:
            self._watcher.cancel()

    def _watch(self) -> None:
        self._watcher = asyncio.create_task(self._wait_until_gone())

    async def _wait_until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone.set()
        self.interrupt(ClientLeft())


class Exchanges:
    """Middleware around all others but CORS; knows what is under way."""

    def __init__(
        self, app: ASGIApp, *, under_way: set[Exchange], timeout_s: float | None, outage: Callable[[], str | None]
    ):
        """`outage`: why there is no engine, None while there is one."""
        self._app = app
        self._under_way = under_way
        self._timeout_s = timeout_s
        self._outage = outage
        self._is_outage_logged = False
        """Probes and clients come back every second: the first request that an outage fails is logged for all."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._is_outage_logged and self._outage() is None:
            self._is_outage_logged = False
        exchange = Exchange(scope, receive, send)
        self._under_way.add(exchange)
        try:
            assign_id(scope)
            async with asyncio.timeout(self._timeout_s) as limit:
                await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            if exchange.end is None:
                raise
            exchange.forgive()
            await self._fail(exchange, exchange.end)
        except TimeoutError as error:
            too_long = APIError(408, f"the request took more than {self._timeout_s} seconds")
            await self._fail(exchange, too_long if limit.expired() else error)  # or it is the endpoint's own
        except Exception as error:
            await self._fail(exchange, error)
        finally:
            self._under_way.discard(exchange)
            exchange.close()

    async def _fail(self, exchange: Exchange, error: Exception) -> None:
        outage = self._outage()
        api_error = as_api_error(error, outage=outage)
        method, path = exchange.scope["method"], exchange.scope["path"]
        if api_error.status == 499:
            logger.info("%s %s: 499, the client left", method, path)
            return
        if is_of_outage(error, outage):
            self._log_outage(f"{method} {path}: {api_error}")
        elif api_error.status == 500:
            logger.error("%s %s failed", method, path, exc_info=error)
        elif exchange.is_started or api_error.status > 500:
            logger.warning("%s %s: %s", method, path, api_error)
        if not exchange.is_started:
            await error_response(api_error)(exchange.scope, exchange.receive, exchange.send)
        elif exchange.is_event_stream and not exchange.is_complete:
            await exchange.send({"type": "http.response.body", "body": error_event(api_error), "more_body": False})
        elif not exchange.is_complete:
            raise error  # uvicorn closes the connection: what was sent is not all

    def _log_outage(self, message: str) -> None:
        if self._is_outage_logged:
            logger.debug("%s", message)
            return
        self._is_outage_logged = True
        logger.warning("%s; further requests that fail for it are logged at level debug", message)
