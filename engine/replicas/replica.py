"""One replica, as its client sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from dovetail.contracts.errors import WorkerError
from dovetail.engine.remote.client import RemoteEngine


@dataclass(eq=False)
class Replica:
    """An engine in a process of its own, and why it takes no requests, if it does not."""

    index: int
    engine: RemoteEngine = field(init=False)
    barrier: str = "it is not in the state of the others yet"
    """Why its engine, which runs, takes no requests; empty: it does."""
    is_foreign: bool = False
    """It is no engine of the others' model and config: nothing is asked of it."""
    silent: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while its process is there and does not answer."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"replica {self.index}"

    @property
    def is_reachable(self) -> bool:
        """Whether it runs and answers."""
        return self.engine.is_running and not self.silent.is_set()

    @property
    def is_admitted(self) -> bool:
        """Whether it runs in the state of the others."""
        return self.engine.is_running and not self.barrier

    @property
    def weight_version(self) -> int:
        """As far as it said how it came to its weights; 0: not."""
        changes = self.engine.weight_changes
        return changes[-1].report.version if changes else 0

    @property
    def trouble(self) -> str:
        """For messages: why it takes no requests; empty: it does."""
        if not self.engine.is_running:
            return "its process ended, or starts"
        if self.silent.is_set():
            return "it does not answer"
        return self.barrier


class ReplicaListener(Protocol):
    """Hears what becomes of replicas. It must return at once."""

    def replica_came(self, replica: Replica) -> None:
        """An engine answers."""

    def replica_lost(self, replica: Replica) -> None:
        """It ended."""

    def replica_updated(self, replica: Replica) -> None:
        """It has other weights than before."""

    def replica_silent(self, replica: Replica, error: WorkerError | None) -> None:
        """It is there and does not answer; None: it answers again."""


@dataclass(frozen=True)
class EngineEvents:
    """Hands on what a `RemoteEngine` reports, with its replica. An `EngineListener`."""

    replica: Replica
    listener: ReplicaListener

    def engine_came(self) -> None:
        """See `EngineListener`."""
        self.listener.replica_came(self.replica)

    def engine_lost(self) -> None:
        """See `EngineListener`."""
        self.listener.replica_lost(self.replica)

    def engine_updated(self) -> None:
        """See `EngineListener`."""
        self.listener.replica_updated(self.replica)

    def engine_silent(self, error: WorkerError | None) -> None:
        """See `EngineListener`."""
        self.listener.replica_silent(self.replica, error)
