"""Notices a replica whose process is there and does not answer, while requests are there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dovetail.contracts.errors import WorkerError
from dovetail.engine.remote.client import RemoteEngine

WATCH_S = 1.0
"""Between questions to a replica that has requests."""


async def watch_answers(
    replica: RemoteEngine, requests: Callable[[], list[str]], report: Callable[[WorkerError | None], None]
) -> None:
    """Runs until it is cancelled. `requests`: ids of those that the replica has. `report` gets what is wrong each time
    that the replica does not answer, and None once it answers again. One that ended is left to those who notice that.
    """
    is_silent = False
    while True:
        await asyncio.sleep(WATCH_S)
        if not replica.is_running:
            is_silent = False
        elif is_silent or requests():
            try:
                await replica.check_health()
            except WorkerError as error:
                if replica.is_running:
                    is_silent = True
                    report(error)
            else:
                if is_silent:
                    is_silent = False
                    report(None)
