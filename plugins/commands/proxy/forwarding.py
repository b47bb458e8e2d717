"""The proxy: asks a prefill server, then a decode server, and passes on what that answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from dovetail.commands.http import error_message, transport_failure
from dovetail.contracts.kv_connector import TRANSFER_PARAMS
from dovetail.plugins.commands.proxy.bodies import is_computed_anyway, prefill_body
from dovetail.plugins.commands.proxy.servers import Servers

logger = logging.getLogger("dovetail.proxy")

PATHS = ("/v1/completions", "/v1/chat/completions")
_PASSED = ("authorization", "x-request-id", "traceparent", "tracestate")
"""Headers of a request that the servers get."""
_RETURNED = ("content-type", "retry-after", "x-request-id")
_STREAM = "text/event-stream"


@dataclass(frozen=True)
class _Prefilled:
    """What came of asking prefill servers; nothing, where none of them answers."""

    params: dict[str, Any] | None = None
    """Where the blocks are."""
    refusal: str = ""
    """Why a server refuses the request, with its address."""


class Proxy:
    """One request becomes two: prompt to a prefill server, all of it to a decode server with where the blocks are.

    Where no prefill server answers, or the one that does refuses the request, the decode server computes the prompt, or
    refuses it in the client's terms. A decode server that fails before it sent anything is followed by the next; one
    that fails later ends the stream with an error.
    """

    def __init__(self, prefill: Servers, decode: Servers, client: httpx.AsyncClient, prefill_timeout_s: float):
        """`prefill_timeout_s`: longest that a prefill server may take. `client` is closed by `close`."""
        self._prefill = prefill
        self._decode = decode
        self._client = client
        self._prefill_timeout_s = prefill_timeout_s

    def app(self) -> Starlette:
        """What a server runs."""
        routes = [Route(path, self._complete, methods=["POST"]) for path in PATHS]
        routes += [Route(path, self._pass_on, methods=["GET"]) for path in ("/v1/models", "/health")]

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await self.close()

        return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _refused})

    async def close(self) -> None:
        """Ends the connections."""
        await self._client.aclose()

    async def _complete(self, request: Request) -> Response:
        try:
            body = orjson.loads(await request.body())
        except orjson.JSONDecodeError as error:
            return _error(400, f"the body is no JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, "the body must be a JSON object")
        if TRANSFER_PARAMS in body:
            return _error(400, f"{TRANSFER_PARAMS}: the proxy says where the blocks are; leave it out")
        headers = {name: value for name in _PASSED if (value := request.headers.get(name)) is not None}
        answer = asyncio.ensure_future(self._answer(request.url.path, body, headers))
        gone = asyncio.ensure_future(_wait_until_gone(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else _error(499, "the client is gone")
        finally:
            answer.cancel()
            gone.cancel()

    async def _answer(self, path: str, body: dict[str, Any], headers: Mapping[str, str]) -> Response:
        if is_computed_anyway(body):
            return await self._ask_decode(path, body, headers)
        found = await self._ask_prefill(path, body, headers)
        if found.params is not None:
            body = {**body, TRANSFER_PARAMS: found.params}
        answer = await self._ask_decode(path, body, headers)
        if found.refusal and answer.status_code == 200:
            logger.warning("a decode server takes a request that a prefill server refuses: %s", found.refusal)
        return answer

    async def _ask_prefill(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> _Prefilled:
        """Asks until a server computes the prompt, or refuses it.

        A server that takes too long is left out for as long as it was waited for: one request pays for it, not each.
        """
        content, failures = orjson.dumps(prefill_body(body)), []
        for url in self._prefill.that_answer():
            try:
                async with asyncio.timeout(self._prefill_timeout_s):
                    response = await self._client.post(url + path, content=content, headers=headers)
            except TimeoutError as error:
                self._prefill.note_silence(url, self._prefill_timeout_s)
                failures.append(f"{url}: {_why(error)}")
                continue
            except httpx.HTTPError as error:
                self._prefill.note_failure(url)
                failures.append(f"{url}: {_why(error)}")
                continue
            if _is_failure(response.status_code):
                self._prefill.note_failure(url)
                failures.append(f"{url}: {error_message(response.content)}")
                continue
            self._prefill.note_answer(url)
            if failures:
                logger.warning("prefill servers failed, and %s answers: %s", url, "; ".join(failures))
            if response.status_code != 200:
                return _Prefilled(refusal=f"{url}: {response.status_code} {error_message(response.content)}")
            found = orjson.loads(response.content).get(TRANSFER_PARAMS)
            return _Prefilled(found if isinstance(found, dict) else None)
        if failures:  # else they were warned of when they took too long
            logger.warning(
                "no prefill server answers, and a decode server computes the prompt: %s", "; ".join(failures)
            )
        return _Prefilled()

    async def _ask_decode(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
        content, failures = orjson.dumps(body), []
        refusal: Response | None = None
        for url in self._decode.in_turn():
            asked = self._client.build_request("POST", url + path, content=content, headers=headers)
            try:
                response = await self._client.send(asked, stream=True)
                answer = await self._first_part(url, response)
            except httpx.HTTPError as error:
                self._note(url, _why(error))
                failures.append(f"{url}: {_why(error)}")
                continue
            if not _is_failure(answer.status_code):
                self._decode.note_answer(url)
                return answer
            self._note(url, f"status {answer.status_code}")
            refusal = answer
        return refusal or _error(502, "no decode server answers: " + "; ".join(failures))

    async def _first_part(self, url: str, response: httpx.Response) -> Response:
        """An answer of which something has come, so that another server need not be asked."""
        try:
            if not response.headers.get("content-type", "").startswith(_STREAM):
                content = await response.aread()
                await response.aclose()
                return _passed_on(response, content)
            pieces = response.aiter_bytes()
            first = await anext(pieces, b"")
        except BaseException:
            await response.aclose()
            raise
        return StreamingResponse(
            self._events(url, response, first, pieces), response.status_code, _returned(response), _STREAM
        )

    async def _events(
        self, url: str, response: httpx.Response, first: bytes, pieces: AsyncIterator[bytes]
    ) -> AsyncGenerator[bytes, None]:
        """Whole events; where the server fails, the last one says so."""
        rest = first
        try:
            while True:
                whole, mark, rest = rest.rpartition(b"\n\n")
                if mark:
                    yield whole + mark
                piece = await anext(pieces, None)
                if piece is None:
                    break
                rest += piece
            if rest:
                yield rest
        except httpx.HTTPError as error:
            self._note(url, _why(error))
            message = f"the decode server {url} failed while it answered: {_why(error)}"
            yield b"data: " + orjson.dumps(_error_data(502, message)) + b"\n\n"
        finally:
            await response.aclose()

    async def _pass_on(self, request: Request) -> Response:
        """What the first decode server that answers says."""
        failures = []
        for url in self._decode.in_turn():
            try:
                response = await self._client.get(url + request.url.path, headers=dict(_authorization(request)))
            except httpx.HTTPError as error:
                self._note(url, _why(error))
                failures.append(f"{url}: {_why(error)}")
                continue
            return _passed_on(response, response.content)
        return _error(503, "no decode server answers: " + "; ".join(failures))

    def _note(self, url: str, why: str) -> None:
        self._decode.note_failure(url)
        logger.warning("%s failed: %s", url, why)


async def _refused(_: Request, error: Exception) -> Response:
    """Of a path or method that the proxy does not serve."""
    assert isinstance(error, HTTPException)
    return _error(error.status_code, f"{error.detail}: the proxy serves POST {' and '.join(PATHS)}")


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _authorization(request: Request) -> list[tuple[str, str]]:
    return [(name, value) for name, value in request.headers.items() if name == "authorization"]


def _is_failure(status: int) -> bool:
    """Whether another server may do better."""
    return status == 429 or status >= 500


def _why(error: Exception) -> str:
    return transport_failure(error).message if isinstance(error, httpx.HTTPError) else "it took too long"


def _returned(response: httpx.Response) -> dict[str, str]:
    return {name: value for name in _RETURNED if (value := response.headers.get(name)) is not None}


def _passed_on(response: httpx.Response, content: bytes) -> Response:
    return Response(content, response.status_code, _returned(response))


def _error_data(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _error(status: int, message: str) -> Response:
    return Response(orjson.dumps(_error_data(status, message)), status, media_type="application/json")
