"""Whoever was served the fewest tokens over its weight is admitted first.

After the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). A scheduler
written from the contract alone (`dovetail.contracts.scheduler`).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveFloat

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.scheduler import KVMemory, RequestState, RequestStatus, Schedule, Scheduler, SchedulerLimits
from dovetail_fair_tenants.tenants import Tenants


class FairShareOptions(PluginOptions):
    """Options of `FairShare`."""

    key: str = "tenant"
    """Key of `SamplingParams.extra` that names the tenant of a request."""
    weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Share of each tenant; 1 for others."""


class FairShare(Scheduler):
    """What runs goes on, in the order in which it was admitted; then waiting requests are admitted, one of the tenant
    that was served least each time. The last to be admitted is the first to be preempted."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options: ClassVar[type[PluginOptions]] = FairShareOptions

    def __init__(self, options: FairShareOptions, limits: SchedulerLimits):
        super().__init__(options, limits)
        self._tenants = Tenants(options.key, options.weights)
        self._running: list[RequestState] = []
        self._waiting: list[RequestState] = []
        self._served: dict[str, float] = {}
        """Tokens that each tenant was served over its weight, for those that have requests."""

    @property
    def num_running(self) -> int:
        """Requests with status RUNNING."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """All others."""
        return len(self._waiting)

    def add(self, request: RequestState) -> None:
        """Takes in a new request. A tenant that comes anew gets no credit for the time before."""
        tenant = self._tenants.name(request)
        if tenant not in self._served:
            self._served[tenant] = min(self._served.values(), default=0.0)
        self._waiting.append(request)

    def remove(self, request: RequestState) -> None:
        """Forgets a request, and its tenant with the last of them."""
        (self._running if request.status is RequestStatus.RUNNING else self._waiting).remove(request)
        tenant = self._tenants.name(request)
        if all(self._tenants.name(other) != tenant for other in [*self._running, *self._waiting]):
            del self._served[tenant]

    def schedule(self, memory: KVMemory) -> Schedule:
        """One step."""
        schedule = Schedule()
        self._continue_all(schedule, memory)
        is_short = not schedule.preempted and self._admit_all(schedule, memory)
        while not schedule.requests and is_short and (held := self._last_held()):
            self._preempt(held, schedule, memory)
            self._continue_all(schedule, memory)
            is_short = self._admit_all(schedule, memory)
        return schedule

    def _continue_all(self, schedule: Schedule, memory: KVMemory) -> None:
        for request in list(self._running):
            if request.status is RequestStatus.RUNNING:  # not preempted for one before it
                self._continue(request, schedule, memory)

    def _continue(self, request: RequestState, schedule: Schedule, memory: KVMemory) -> None:
        count = self._ask(request, schedule)
        if count == 0:
            return
        granted = memory.grant(request, count)
        while not granted and memory.num_missing_blocks(request, count):
            victim = self._running[-1]
            if victim is request and not schedule.requests:
                victim = self._last_held() or request
            self._preempt(victim, schedule, memory)
            if victim is request:
                return
            granted = memory.grant(request, count)
        self._take(request, granted, schedule)

    def _admit_all(self, schedule: Schedule, memory: KVMemory) -> bool:
        """Admits requests until one waits for blocks or for a place; whether one does."""
        passed: set[RequestState] = set()
        while True:
            candidates = [r for r in self._waiting if not r.is_held and r not in passed and r not in schedule.preempted]
            if not candidates:
                return False
            request = min(
                candidates, key=lambda request: self._served[self._tenants.name(request)]
            )  # the first of equal ones
            if len(self._running) == self.limits.max_num_seqs:
                return True
            if request.status is not RequestStatus.SWAPPED:
                if memory.awaits_prefix(request):
                    passed.add(request)
                    continue
                memory.attach_prefix(request)
            count = self._ask(request, schedule)
            is_short = count > 0 and memory.num_missing_blocks(request, count) > 0
            if count == 0 or is_short or not self._start(request, count, schedule, memory):
                if request.status is not RequestStatus.SWAPPED:
                    memory.release(request)
                if is_short:
                    return True
                passed.add(request)

    def _start(self, request: RequestState, count: int, schedule: Schedule, memory: KVMemory) -> bool:
        """Whether the request runs now."""
        is_swapped = request.status is RequestStatus.SWAPPED
        if is_swapped:
            memory.swap_in(request)
        granted = memory.grant(request, count)
        if granted or is_swapped:
            self._waiting.remove(request)
            self._running.append(request)
            request.status = RequestStatus.RUNNING
            self._take(request, granted, schedule)
        return request.status is RequestStatus.RUNNING

    def _ask(self, request: RequestState, schedule: Schedule) -> int:
        """Tokens to ask for, at most what the limits leave; a prompt is computed in part alone."""
        limits, left = self.limits, self.limits.max_num_batched_tokens - sum(schedule.num_tokens)
        known = request.num_tokens - request.num_computed_tokens
        count = min(request.num_wanted_tokens, left)
        if limits.enable_chunked_prefill and 0 < limits.long_prefill_token_threshold < known:
            count = min(count, limits.long_prefill_token_threshold)
        others = zip(schedule.requests, schedule.num_tokens, strict=True)
        if count < known and any(n < other.num_tokens - other.num_computed_tokens for other, n in others):
            return 0
        if not limits.enable_chunked_prefill and count < known <= limits.max_num_batched_tokens:
            return 0
        return count

    def _take(self, request: RequestState, granted: int, schedule: Schedule) -> None:
        if granted:
            schedule.requests.append(request)
            schedule.num_tokens.append(granted)
            tenant = self._tenants.name(request)
            self._served[tenant] += self._tenants.weighted(tenant, granted)

    def _last_held(self) -> RequestState | None:
        return next((request for request in reversed(self._running) if request.is_held), None)

    def _preempt(self, request: RequestState, schedule: Schedule, memory: KVMemory) -> None:
        if memory.swap_out(request):
            request.status = RequestStatus.SWAPPED
        else:
            memory.release(request)
            request.status = RequestStatus.PREEMPTED
        self._running.remove(request)
        self._waiting.insert(0, request)
        schedule.preempted.append(request)
