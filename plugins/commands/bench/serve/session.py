"""The measurement: servers by turns, each turn the same prompts at the same times."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from dovetail.commands.arrivals import draw_arrivals
from dovetail.commands.http import create_client, error_message, transport_failure, without_password
from dovetail.commands.progress import Progress
from dovetail.contracts.errors import DovetailError
from dovetail.plugins.commands.bench.serve.client import (
    STREAM_OPTIONS,
    Ask,
    Form,
    Reply,
    Sending,
    Target,
    UsageAsked,
    send,
)
from dovetail.plugins.commands.bench.serve.lag import ClientLoad, LoadWatch
from dovetail.plugins.commands.bench.serve.settings import Traffic

_T = TypeVar("_T")
_REFUSED = (400, 404, 422, 501)


@dataclass(frozen=True)
class Connection:
    """How servers are reached."""

    api_key: str | None
    headers: Mapping[str, str]
    timeout_s: float

    def client(self) -> httpx.AsyncClient:
        """A client."""
        return create_client(api_key=self.api_key, headers=self.headers, timeout_s=self.timeout_s)

    def all_headers(self) -> dict[str, str]:
        """Headers of a request, for other clients."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {**key, **self.headers}


@dataclass(frozen=True)
class Plan:
    """What is sent, to whom, and how."""

    name: str
    targets: Sequence[Target]
    asks: Sequence[Ask]
    warmups: Sequence[Ask]
    form: Form
    traffic: Traffic
    turn_size: int
    """Requests of a turn."""

    def workload(self, target: Target) -> str:
        """The name of the workload on one server."""
        return self.name if len(self.targets) == 1 else f"{self.name} @ {target.label}"


@dataclass(frozen=True)
class Turn:
    """Some consecutive prompts on one server."""

    number: int
    target: Target
    replies: Sequence[Reply]
    """By prompt."""

    @property
    def seconds(self) -> float:
        """From the first arrival to the end of the last request."""
        return max(reply.ended for reply in self.replies) - min(reply.arrival for reply in self.replies)


@dataclass(frozen=True)
class Measured:
    """What came of it."""

    turns: Sequence[Turn]
    usage_asked: Mapping[str, UsageAsked]
    """By label."""
    client: ClientLoad


def run_async(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine, on uvloop where there is one: it delays chunks less."""
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def find_model(connection: Connection, base_url: str) -> str:
    """The first model that a server lists. Raises `DovetailError` where it cannot be asked."""
    url = f"{base_url}/v1/models"
    shown = without_password(url)
    async with connection.client() as client:
        try:
            answer = await client.get(url)
        except httpx.HTTPError as error:
            told = transport_failure(error).message
            raise DovetailError(f"{shown} cannot be reached ({told}): start the server, or give another URL") from None
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        told = error_message(answer.content)
        raise DovetailError(f"{shown} lists no model ({answer.status_code}: {told}): give --model NAME") from None


async def measure(plan: Plan, connection: Connection) -> Measured:
    """Checks each server, warms it up, and runs all turns; the order of servers rotates from turn to turn.

    Raises `DovetailError` where a server does not answer one short request. Later failures are in the replies.
    """
    async with connection.client() as client:
        with Progress(len(plan.asks) * len(plan.targets)) as progress:
            usage = {target.label: await _ask_usage(client, plan, target) for target in plan.targets}
            session = _Session(client, plan, usage)
            for target in plan.targets:
                progress.show(f"{target.label}: warm-up")
                await session.run(_Part(-1, 0, plan.warmups, [0.0] * len(plan.warmups)), target)
            # The collector need not look at prompts while tokens come.
            gc.collect()
            gc.freeze()
            try:
                async with LoadWatch() as watch:
                    turns = await _turns(session, progress)
            finally:
                gc.unfreeze()
    return Measured(turns, usage, watch.found())


@dataclass(frozen=True)
class _Part:
    """Consecutive prompts."""

    number: int
    begin: int
    asks: Sequence[Ask]
    arrivals: Sequence[float]


def _parts(plan: Plan) -> Iterator[_Part]:
    arrivals = [ask.arrival for ask in plan.asks if ask.arrival is not None]
    if not arrivals:
        traffic = plan.traffic
        arrivals = draw_arrivals(
            len(plan.asks), traffic.rate, traffic.burstiness, traffic.seed, burst_size=traffic.burst_size
        )
    for number, begin in enumerate(range(0, len(plan.asks), plan.turn_size)):
        end = begin + plan.turn_size
        yield _Part(number, begin, plan.asks[begin:end], [time - arrivals[begin] for time in arrivals[begin:end]])


async def _turns(session: _Session, progress: Progress) -> list[Turn]:
    targets, turns = session.plan.targets, []
    for part in _parts(session.plan):
        shift = part.number % len(targets)
        for target in [*targets[shift:], *targets[:shift]]:
            progress.show(f"{target.label}: turn {part.number + 1}")
            turns.append(await session.run(part, target, progress.advance))
    return turns


@dataclass(frozen=True)
class _Session:
    client: httpx.AsyncClient
    plan: Plan
    usage: Mapping[str, UsageAsked]

    async def run(self, part: _Part, target: Target, on_end: Callable[[], None] = lambda: None) -> Turn:
        """Sends each request at its time, whether or not earlier ones are done, and returns when all have ended."""
        plan, usage = self.plan, self.usage[target.label]
        url, workload = target.base_url + plan.form.endpoint, plan.workload(target)
        sendings = [
            Sending(url, plan.form.body(target, ask, usage), workload, part.number, part.begin + index, arrival, ask)
            for index, (ask, arrival) in enumerate(zip(part.asks, part.arrivals, strict=True))
        ]
        slots = asyncio.Semaphore(plan.traffic.max_concurrency or max(1, len(sendings)))
        start = time.monotonic()

        async def one(sending: Sending) -> Reply:
            # uvloop rounds to milliseconds, and may wake too early.
            while (left := start + sending.arrival - time.monotonic()) > 0:
                await asyncio.sleep(left)
            async with slots:
                reply = await send(self.client, sending, start)
            on_end()
            return reply

        return Turn(part.number, target, list(await asyncio.gather(*map(one, sendings))))


async def _ask_usage(client: httpx.AsyncClient, plan: Plan, target: Target) -> UsageAsked:
    """What the server is asked to say of its token counts: the most that it does not refuse, found with one token."""
    prompt = plan.asks[0].prompt
    short = Ask("Hello" if isinstance(prompt, str) else prompt[:1], 1)
    url = target.base_url + plan.form.endpoint
    told = ""
    for usage in STREAM_OPTIONS:
        sending = Sending(url, plan.form.body(target, short, usage), "probe", -1, 0, 0.0, short)
        reply = await send(client, sending, time.monotonic())
        if reply.failure is None or reply.failure.kind == "no tokens":
            return usage
        told = f"{reply.failure.kind}: {reply.failure.message}"
        if reply.failure.kind not in [f"http {status}" for status in _REFUSED]:
            break
    raise DovetailError(
        f"{without_password(url)} does not answer a request of one token for the model {target.model!r} ({told}):"
        " check the URL, --model, --endpoint and --api-key"
    )
