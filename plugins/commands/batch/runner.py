"""Sends the requests of a batch, some at a time, and writes each answer as it comes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from dovetail.commands.http import Failure, create_client, error_message, transport_failure
from dovetail.contracts.errors import DovetailError
from dovetail.plugins.commands.batch.lines import BatchRequest, answer_line, failure_line
from dovetail.plugins.commands.batch.output import OutputFile

_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
LONGEST_RETRY_AFTER_S = 60.0
"""A server that asks for a longer pause is asked again after this: the header must not stop a batch for hours."""


@dataclass(frozen=True)
class Server:
    """Where requests go."""

    base_url: str
    api_key: str | None
    timeout_s: float
    max_concurrency: int
    max_retries: int
    uds: str | None = None
    """Path of a Unix socket, which all requests go to."""


@dataclass
class Tally:
    """What became of the requests."""

    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    failures: list[str] = field(default_factory=list)
    """A line for each failed request."""

    def count(self, request: BatchRequest, answer: _Answer) -> None:
        """Counts one request."""
        if answer.problem is not None:
            self.failed += 1
            self.failures.append(f"line {request.line} ({request.custom_id}): {answer.problem}")
            return
        self.answered += 1
        usage = answer.usage
        self.prompt_tokens += int(usage.get("prompt_tokens") or 0)
        self.output_tokens += int(usage.get("completion_tokens") or 0)


@dataclass(frozen=True)
class _Answer:
    line: bytes
    usage: Mapping[str, Any]
    problem: str | None


async def run_batch(
    server: Server, requests: Sequence[BatchRequest], output: OutputFile, tally: Tally, on_end: Callable[[], None]
) -> None:
    """Answers all requests; `tally` and the file have what is done when this is cancelled.

    Raises `DovetailError` where the file cannot be written.
    """
    waiting = iter(requests)
    async with create_client(api_key=server.api_key, timeout_s=server.timeout_s, uds=server.uds) as client:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(server.max_concurrency, len(requests))):
                    group.create_task(_work(client, server, waiting, output, tally, on_end))
        except* DovetailError as errors:
            raise errors.exceptions[0] from None


async def _work(
    client: httpx.AsyncClient,
    server: Server,
    waiting: Iterator[BatchRequest],
    output: OutputFile,
    tally: Tally,
    on_end: Callable[[], None],
) -> None:
    for request in waiting:
        answer = await _answer(client, server, request)
        output.append(answer.line)
        tally.count(request, answer)
        on_end()


async def _answer(client: httpx.AsyncClient, server: Server, request: BatchRequest) -> _Answer:
    """The answer, or the last failure after all retries."""
    content = orjson.dumps(request.body)
    url = server.base_url + request.url
    for attempt in range(server.max_retries + 1):
        is_last = attempt == server.max_retries
        try:
            response = await client.post(url, content=content)
        except httpx.HTTPError as error:
            failure = transport_failure(error)
            if is_last:
                return _failed(request, failure)
            await asyncio.sleep(pause_before_retry(attempt, None))
            continue
        if is_last or response.status_code not in _RETRIED:
            return _told(request, response)
        await asyncio.sleep(pause_before_retry(attempt, response.headers.get("retry-after")))
    raise AssertionError("the last attempt returns")


def pause_before_retry(attempt: int, retry_after: str | None) -> float:
    """Seconds until the next attempt: as the server says, up to `LONGEST_RETRY_AFTER_S`, or twice as long each time,
    spread so that not all come at once. `attempt`: from 0; `retry_after`: the header, where there is one."""
    if retry_after is not None and retry_after.strip().isdecimal():
        return min(LONGEST_RETRY_AFTER_S, float(retry_after))
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.0)


def _told(request: BatchRequest, response: httpx.Response) -> _Answer:
    """The line of what the server said; a body that is no JSON becomes an error in OpenAI's shape."""
    try:
        body = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        if response.status_code == 200:
            return _failed(request, Failure("bad answer", "the server's answer is no JSON"))
        told = error_message(response.content) or "the server said nothing"
        body = {"error": {"message": told, "type": "http_error", "param": None, "code": response.status_code}}
    line = answer_line(request.custom_id, response.status_code, response.headers.get("x-request-id"), body)
    if response.status_code == 200:
        usage = body.get("usage") if isinstance(body, dict) else None
        return _Answer(line, usage if isinstance(usage, dict) else {}, None)
    return _Answer(line, {}, f"status {response.status_code}: {error_message(response.content)}")


def _failed(request: BatchRequest, failure: Failure) -> _Answer:
    return _Answer(failure_line(request.custom_id, failure), {}, f"{failure.kind}: {failure.message}")
