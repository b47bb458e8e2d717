"""Which replica gets a request, and what the router hears of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from dovetail.contracts.errors import WorkerError
from dovetail.contracts.router import (
    CacheEvent,
    FollowsBlocks,
    FollowsRequests,
    ReplicaState,
    RoutedRequest,
    Router,
    choose_replica,
    report_event,
)
from dovetail.engine.replicas.replica import Replica


@dataclass(slots=True)
class _Load:
    """What one replica has of this host's requests."""

    replica: Replica
    has_cache: bool = False
    """Whether the router knows of its blocks."""
    waiting: dict[str, int] = field(default_factory=dict)
    """By request id, prompt tokens of requests whose first output has not come."""
    running: dict[str, int] = field(default_factory=dict)
    """Likewise of the others."""

    def state(self, excluded: Collection[int]) -> ReplicaState:
        replica = self.replica
        return ReplicaState(
            index=replica.index,
            name=replica.name,
            is_up=replica.is_admitted and replica.is_reachable and replica.index not in excluded,
            num_waiting=len(self.waiting),
            num_running=len(self.running),
            waiting_prompt_tokens=sum(self.waiting.values()),
            running_prompt_tokens=sum(self.running.values()),
            kv_usage=replica.engine.kv_usage,
        )


class Routing:
    """Counts the requests of each replica, and asks the router. All of it in one event loop."""

    def __init__(self, router: Router, replicas: Sequence[Replica]):
        self._router = router
        self._loads = [_Load(replica) for replica in replicas]
        self._places: dict[str, int] = {}
        """By request id, the replica that has it."""
        self._bereft: set[str] = set()
        """Ids of requests whose replica died, and of which the router has not heard since."""

    @property
    def states(self) -> list[ReplicaState]:
        """The replicas as routers see them."""
        return [load.state(()) for load in self._loads]

    def place(self, request: RoutedRequest, excluded: Collection[int] = ()) -> int:
        """The replica that takes a request, none of `excluded`. Raises `WorkerError` where none is up, `PluginError`
        as `choose_replica`."""
        states = [load.state(excluded) for load in self._loads]
        if not any(state.is_up for state in states):
            raise WorkerError(f"no replica takes the request: {self._refusals()}")
        index = choose_replica(self._router, type(self._router).__name__, request, states)
        self._places[request.request_id] = index
        self._bereft.discard(request.request_id)
        self._loads[index].waiting[request.request_id] = request.num_prompt_tokens
        return index

    @property
    def follows_blocks(self) -> bool:
        """Whether the router hears what the replicas' prefix caches have."""
        return isinstance(self._router, FollowsBlocks)

    def cache_changed(self, index: int, events: Iterable[CacheEvent]) -> None:
        """The prefix cache of a replica changed."""
        if self._loads[index].has_cache:
            for event in events:
                report_event(self._router, index, event)

    def prefilled(self, request_id: str) -> None:
        """The first output of a request came."""
        index = self._places.get(request_id)
        if index is None or request_id not in self._loads[index].waiting:
            return
        load = self._loads[index]
        load.running[request_id] = load.waiting.pop(request_id)
        if isinstance(self._router, FollowsRequests):
            self._router.prefilled(request_id)

    def finished(self, request_id: str) -> None:
        """A request ended, or is at no replica. Unknown ones are passed over."""
        index = self._places.pop(request_id, None)
        if index is not None:
            self._loads[index].waiting.pop(request_id, None)
            self._loads[index].running.pop(request_id, None)
        elif request_id not in self._bereft:
            return
        self._bereft.discard(request_id)
        if isinstance(self._router, FollowsRequests):
            self._router.finished(request_id)

    def came_up(self, index: int) -> None:
        """What a replica's cache has is reported from now on."""
        self._loads[index].has_cache = True

    def requests_of(self, index: int) -> list[str]:
        """Ids of the requests that a replica has."""
        return [*self._loads[index].waiting, *self._loads[index].running]

    def went_down(self, index: int) -> None:
        """A replica died, with its requests and its blocks."""
        load = self._loads[index]
        self._loads[index] = _Load(load.replica)
        for request_id in (*load.waiting, *load.running):
            del self._places[request_id]
            self._bereft.add(request_id)
        if isinstance(self._router, FollowsRequests | FollowsBlocks):
            self._router.replica_lost(index)

    def _refusals(self) -> str:
        replicas = (load.replica for load in self._loads)
        return "; ".join(f"{replica.name}: {replica.trouble or 'it failed with this one'}" for replica in replicas)
