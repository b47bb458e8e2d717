"""Events in order of time: arrivals that a router sends to replicas, and the ends of the replicas' steps."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from dovetail.contracts.router import (
    CacheEvent,
    FollowsRequests,
    ReplicaState,
    RoutedRequest,
    Router,
    choose_replica,
    report_event,
)
from dovetail.plugins.commands.simulate_routing.replica import CostModel, Job, SimulatedReplica, StepEnd
from dovetail.plugins.commands.simulate_routing.workload import SimulatedRequest


@dataclass(kw_only=True)
class Outcome:
    """What became of a trace with one router."""

    ttft: list[float] = field(default_factory=list)
    """Seconds from arrival to the first output token, in order of these tokens."""
    input_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the replicas' prefix caches had."""
    busy_seconds: list[float] = field(default_factory=list)
    """By replica: time in steps."""
    requests: list[int] = field(default_factory=list)
    """By replica."""
    seconds: float = 0.0
    """From the first arrival to the end of the last request."""


class Simulation:
    """One router over `num_replicas` replicas."""

    def __init__(self, router: Router, num_replicas: int, costs: CostModel, max_tokens: int, label: str):
        self._router = router
        self._costs = costs
        self._max_tokens = max_tokens
        self._label = label
        self._replicas = [SimulatedReplica(costs) for _ in range(num_replicas)]
        self._states = [ReplicaState(index=index, name=f"replica {index}") for index in range(num_replicas)]
        self._ends: list[tuple[float, int]] = []
        self._outcome = Outcome(requests=[0] * num_replicas)

    def run(self, requests: Sequence[SimulatedRequest], on_arrival: Callable[[Outcome], None]) -> Outcome:
        """Simulates requests, which are in order of arrival. Calls `on_arrival` after each was sent, with what became
        of those before it."""
        for request in requests:
            self._run_until(request.arrival)
            self._send(request)
            on_arrival(self._outcome)
        self._run_until(float("inf"))
        self._outcome.busy_seconds = [one.busy_seconds for one in self._replicas]
        return self._outcome

    def _run_until(self, time: float) -> None:
        while self._ends and self._ends[0][0] <= time:
            now, index = heapq.heappop(self._ends)
            # An arrival may have cut the steps after this entry was made; then there is an earlier one.
            if self._replicas[index].ends == now:
                self._take_in(index, self._replicas[index].end(), now)
                self._begin(index, now)

    def _send(self, request: SimulatedRequest) -> None:
        index = choose_replica(self._router, self._label, self._routed(request), self._states)
        self._outcome.requests[index] += 1
        state = self._states[index]
        self._states[index] = replace(
            state,
            num_waiting=state.num_waiting + 1,
            waiting_prompt_tokens=state.waiting_prompt_tokens + request.input_tokens,
        )
        self._replicas[index].add(request, request.arrival)
        self._begin(index, request.arrival)

    def _routed(self, request: SimulatedRequest) -> RoutedRequest:
        return RoutedRequest(
            request_id=request.request_id,
            num_prompt_tokens=request.input_tokens,
            max_tokens=self._max_tokens,
            block_size=self._costs.block_size,
            block_hashes=request.block_hashes,
        )

    def _begin(self, index: int, now: float) -> None:
        replica = self._replicas[index]
        self._publish(index, replica.start(now))
        if replica.ends is not None:
            heapq.heappush(self._ends, (replica.ends, index))

    def _take_in(self, index: int, end: StepEnd, now: float) -> None:
        self._publish(index, end.events)
        for job in end.prefilled:
            self._outcome.ttft.append(now - job.request.arrival)
            self._outcome.input_tokens += job.request.input_tokens
            self._outcome.cached_tokens += job.num_cached
        if end.prefilled or end.finished:
            self._states[index] = _counted(self._states[index], end, self._replicas[index].kv_usage)
            self._outcome.seconds = now
        if isinstance(self._router, FollowsRequests):
            for job in end.prefilled:
                self._router.prefilled(job.request.request_id)
            for job in end.finished:
                self._router.finished(job.request.request_id)

    def _publish(self, index: int, events: Iterable[CacheEvent]) -> None:
        for event in events:
            report_event(self._router, index, event)


def _counted(state: ReplicaState, end: StepEnd, kv_usage: float) -> ReplicaState:
    """The state after steps, as a host would count."""
    prefilled, finished = _tokens(end.prefilled), _tokens(end.finished)
    return replace(
        state,
        num_waiting=state.num_waiting - len(end.prefilled),
        num_running=state.num_running + len(end.prefilled) - len(end.finished),
        waiting_prompt_tokens=state.waiting_prompt_tokens - prefilled,
        running_prompt_tokens=state.running_prompt_tokens + prefilled - finished,
        kv_usage=kv_usage,
    )


def _tokens(jobs: Iterable[Job]) -> int:
    return sum(job.request.input_tokens for job in jobs)
