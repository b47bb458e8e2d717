"""The client of a server: one request, streamed, with the time of each token."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import orjson

from dovetail.commands.http import Failure, status_failure, transport_failure
from dovetail.plugins.commands.bench.serve.reply import CountedBy, ReplyError, ReplyReader
from dovetail.plugins.commands.bench.serve.sse import EventReader
from dovetail.plugins.commands.bench.timing import RequestTimes

UsageAsked = Literal["running usage", "usage", "none"]
"""What the server was asked to say of its token counts."""
STREAM_OPTIONS: Mapping[UsageAsked, Mapping[str, Any]] = {
    "running usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "usage": {"stream_options": {"include_usage": True}},
    "none": {},
}
"""By what is asked for, the most first."""


@dataclass(frozen=True)
class Target:
    """A server that is measured."""

    label: str
    base_url: str
    model: str


@dataclass(frozen=True)
class Ask:
    """One request to be sent."""

    prompt: str | tuple[int, ...]
    """Text, or token ids."""
    output_tokens: int
    """Most tokens of the reply."""
    arrival: float | None = None
    """Seconds from the start, where a trace says when the request comes."""


@dataclass(frozen=True)
class Form:
    """What all requests have in common."""

    endpoint: str
    """Path of the URL."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Of the body: sampling parameters, and what the server knows besides."""

    @property
    def is_chat(self) -> bool:
        """Whether prompts are sent as messages."""
        return self.endpoint.endswith("/chat/completions")

    def body(self, target: Target, ask: Ask, usage: UsageAsked) -> bytes:
        """The JSON of a request."""
        chat = {"messages": [{"role": "user", "content": ask.prompt}]}
        prompt: Mapping[str, Any] = chat if self.is_chat else {"prompt": ask.prompt}
        limit = {"max_tokens": ask.output_tokens}
        return orjson.dumps(
            {"model": target.model, **prompt, **limit, **self.fields, "stream": True, **STREAM_OPTIONS[usage]}
        )


@dataclass(frozen=True)
class Reply:
    """What became of one request. Times are seconds from the start of its turn."""

    index: int
    """Of the prompt."""
    arrival: float
    sent: float
    ended: float
    asked_tokens: int
    times: RequestTimes | None
    """None where the request failed."""
    text: str
    finish_reason: str | None
    counted_by: CountedBy | None
    failure: Failure | None


@dataclass(frozen=True)
class Sending:
    """One request, ready to be sent."""

    url: str
    body: bytes
    workload: str
    turn: int
    index: int
    arrival: float
    ask: Ask


async def send(client: httpx.AsyncClient, sending: Sending, start: float) -> Reply:
    """Sends a request now and reads its reply; every failure is one of the reply. `start`: of the turn's clock."""
    reader = ReplyReader()
    sent = time.monotonic() - start
    failure = None
    times, counted_by = None, None
    try:
        await _stream(client, sending, reader, start)
        counted = reader.finish()
        counted_by = counted.counted_by
        length = 0 if isinstance(sending.ask.prompt, str) else len(sending.ask.prompt)
        times = RequestTimes(
            workload=sending.workload,
            repetition=sending.turn,
            arrival=sending.arrival,
            sent=sent,
            scheduled=None,
            prompt_tokens=length if reader.prompt_tokens is None else reader.prompt_tokens,
            cached_tokens=reader.cached_tokens,
            tokens=counted.tokens,
            counted_tokens=counted.total,
        )
    except ReplyError as error:
        failure = error.failure
    except httpx.HTTPError as error:
        failure = transport_failure(error)
    return Reply(
        index=sending.index,
        arrival=sending.arrival,
        sent=sent,
        ended=time.monotonic() - start,
        asked_tokens=sending.ask.output_tokens,
        times=times,
        text="".join(reader.text),
        finish_reason=reader.finish_reason,
        counted_by=counted_by,
        failure=failure,
    )


async def _stream(client: httpx.AsyncClient, sending: Sending, reader: ReplyReader, start: float) -> None:
    events = EventReader()
    async with client.stream("POST", sending.url, content=sending.body) as response:
        if response.status_code != 200:
            told = status_failure(response.status_code, await response.aread())
            raise ReplyError(told.kind, told.message)
        async for piece in response.aiter_bytes():
            clock = time.monotonic() - start
            for data in events.feed(piece):
                reader.take(data, clock)
