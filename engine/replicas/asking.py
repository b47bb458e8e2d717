"""Questions to several replicas at once, none of which may wait for one that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dovetail.contracts.errors import DovetailError, WorkerError
from dovetail.engine.remote.client import RemoteEngine
from dovetail.engine.replicas.replica import Replica

Value = TypeVar("Value")
Do = Callable[[RemoteEngine], Awaitable[Any]]


@dataclass(frozen=True)
class Answers:
    """What replicas answered."""

    done: dict[Replica, Any]
    """By replica, in their order."""
    failed: dict[Replica, BaseException]
    """Those that refused, or could not do it."""
    gone: dict[Replica, BaseException]
    """Those that ended, or did not answer: whether they did it is not known."""

    @property
    def first(self) -> Any:
        """The answer of the first replica; there is one."""
        return next(iter(self.done.values()))

    def error(self) -> BaseException:
        """What to raise where some failed, or all are gone. It names the replica where others did otherwise."""
        replica, error = next(iter((self.failed or self.gone).items()))
        if len(self.failed) + len(self.gone) > 1 and not self.done:
            return error
        if not isinstance(error, DovetailError):
            return error
        try:
            return type(error)(f"{replica.name}: {error}")
        except TypeError:  # it takes more than a message
            return error


async def ask(replicas: Iterable[Replica], do: Do) -> Answers:
    """Asks all of them at once. Replicas that end or fall silent meanwhile are `gone`."""
    return await answers_of(begin(replicas, do))


def begin(replicas: Iterable[Replica], do: Do) -> dict[Replica, asyncio.Future[Any]]:
    """As `ask`, without waiting: what is asked goes out with this turn of the event loop."""
    return {replica: asyncio.ensure_future(answered(replica, do(replica.engine))) for replica in replicas}


async def answers_of(asked: dict[Replica, asyncio.Future[Any]]) -> Answers:
    """The answers to what `begin` asked."""
    results: Sequence[Any] = await asyncio.gather(*asked.values(), return_exceptions=True)
    answers = Answers({}, {}, {})
    for replica, result in zip(asked, results, strict=True):
        if not isinstance(result, BaseException):
            answers.done[replica] = result
        elif isinstance(result, WorkerError) and not replica.is_reachable:
            answers.gone[replica] = result
        else:
            answers.failed[replica] = result
    return answers


async def answered(replica: Replica, work: Awaitable[Value]) -> Value:
    """What `work`, which asks this replica, returns. Raises `WorkerError` once the replica does not answer."""
    task = asyncio.ensure_future(work)
    silent = asyncio.ensure_future(replica.silent.wait())
    try:
        await asyncio.wait({task, silent}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise WorkerError(f"{replica.name} does not answer")
        return task.result()
    finally:
        task.cancel()
        silent.cancel()
