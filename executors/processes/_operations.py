"""What a driver asks of its workers, and what may go wrong with it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dovetail.contracts.errors import PluginError, WorkerError
from dovetail.executors.processes._messages import RemoteError


@dataclass(frozen=True)
class Timeouts:
    """How long workers may take, in seconds."""

    start_s: float
    """To load, and to answer a call."""
    step_s: float | None
    """To run a step; None: any time."""


@dataclass(frozen=True)
class Failure:
    """Why the group ended, or why a call failed on one rank."""

    rank: int | None
    message: str
    cause: Exception | None = None

    def error(self) -> WorkerError:
        """A new exception each time: raising one twice would pile up tracebacks."""
        error = WorkerError(self.message, rank=self.rank)
        error.__cause__ = self.cause
        return error


@dataclass
class Operation:
    """What was asked of the workers and not answered yet."""

    label: str
    waiting: set[int]
    """Ranks whose answers are outstanding."""
    timeout_s: float | None = None
    option: str = "executor.start_timeout_s"
    """What sets the timeout."""
    finish: Callable[[list[Any]], Any] = list
    """From the answers in rank order to the future's result."""
    outlives_errors: bool = False
    """An error is an answer like another, for the caller; otherwise it ends the group."""
    future: Future[Any] = field(default_factory=Future)
    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)

    def complete(self) -> None:
        """Resolves the future once all ranks have answered; the lowest rank's error counts."""
        if self.failures:
            failure = self.failures[min(self.failures)]
            self.future.set_exception(failure.cause or failure.error())
        else:
            self.future.set_result(self.finish([self.values[rank] for rank in sorted(self.values)]))


def remote_failure(rank: int, label: str, remote: RemoteError) -> Failure:
    """An error as the worker had it, with the worker's traceback as a note."""
    where = f"rank {rank} on host {remote.host}"
    message = f"worker rank {rank} failed in {label}: {remote.summary}"
    try:
        cause = pickle.loads(remote.pickled or b"")
    except Exception:  # of a type that does not pickle, or that this process cannot import
        cause = None
    if not isinstance(cause, Exception):
        return Failure(rank, f"{message}\n{remote.traceback}")
    if isinstance(cause, PluginError):
        cause.args = (f"{where}: {cause}", *cause.args[1:])
    cause.add_note(f"Raised by {where}:\n{remote.traceback}")
    return Failure(rank, message, cause)
