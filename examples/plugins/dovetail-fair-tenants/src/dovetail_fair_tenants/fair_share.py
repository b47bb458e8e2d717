"""Whoever was served the fewest tokens over its weight is admitted first.

After the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). A scheduler
written from the contract alone (`dovetail.contracts.scheduler`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
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


class _Account:
    """A tenant that has requests. One that comes anew gets no credit for the time before."""

    def __init__(self, others: Iterable[_Account]):
        self.served = min((other.served for other in others), default=0.0)
        """Tokens over its weight."""
        self.num_requests = 0
        self.waiting: deque[RequestState] = deque()
        """In the order in which they came, preempted ones first."""


class _Step:
    """A schedule, and what the limits leave of it: counted along, so that no request costs a look at all others."""

    def __init__(self, limits: SchedulerLimits):
        self.schedule = Schedule()
        self.left = limits.max_num_batched_tokens
        self.has_part = False
        """Whether some prompt is computed in part."""


class FairShare(Scheduler):
    """What runs goes on, in the order in which it was admitted; then waiting requests are admitted, one of the tenant
    that was served least each time. The last to be admitted is the first to be preempted."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options: ClassVar[type[PluginOptions]] = FairShareOptions

    def __init__(self, options: FairShareOptions, limits: SchedulerLimits):
        super().__init__(options, limits)
        self._tenants = Tenants(options.key, options.weights)
        self._running: list[RequestState] = []
        self._accounts: dict[str, _Account] = {}
        """By tenant."""

    @property
    def num_running(self) -> int:
        """Requests with status RUNNING."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """All others."""
        return sum(len(account.waiting) for account in self._accounts.values())

    def add(self, request: RequestState) -> None:
        """Takes in a new request."""
        tenant = self._tenants.name(request)
        if tenant not in self._accounts:
            self._accounts[tenant] = _Account(self._accounts.values())
        self._accounts[tenant].num_requests += 1
        self._accounts[tenant].waiting.append(request)

    def remove(self, request: RequestState) -> None:
        """Forgets a request, and its tenant with the last of them."""
        account = self._account(request)
        (self._running if request.status is RequestStatus.RUNNING else account.waiting).remove(request)
        account.num_requests -= 1
        if not account.num_requests:
            del self._accounts[self._tenants.name(request)]

    def schedule(self, memory: KVMemory) -> Schedule:
        """One step."""
        step = _Step(self.limits)
        schedule = step.schedule
        self._continue_all(step, memory)
        is_short = not schedule.preempted and self._admit_all(step, memory)
        while not schedule.requests and is_short and (held := self._last_held()):
            self._preempt(held, schedule, memory)
            self._continue_all(step, memory)
            is_short = self._admit_all(step, memory)
        return schedule

    def _account(self, request: RequestState) -> _Account:
        return self._accounts[self._tenants.name(request)]

    def _continue_all(self, step: _Step, memory: KVMemory) -> None:
        for request in list(self._running):
            if request.status is RequestStatus.RUNNING:  # not preempted for one before it
                self._continue(request, step, memory)

    def _continue(self, request: RequestState, step: _Step, memory: KVMemory) -> None:
        count = self._ask(request, step)
        if count == 0:
            return
        granted = memory.grant(request, count)
        while not granted and memory.num_missing_blocks(request, count):
            victim = self._running[-1]
            if victim is request and not step.schedule.requests:
                victim = self._last_held() or request
            self._preempt(victim, step.schedule, memory)
            if victim is request:
                return
            granted = memory.grant(request, count)
        self._take(request, granted, step)

    def _admit_all(self, step: _Step, memory: KVMemory) -> bool:
        """Admits requests until one waits for blocks or for a place; whether one does."""
        passed = set(step.schedule.preempted)
        while (request := self._next(passed)) is not None:
            if len(self._running) == self.limits.max_num_seqs:
                return True
            if request.status is not RequestStatus.SWAPPED:
                if memory.awaits_prefix(request):
                    passed.add(request)
                    continue
                memory.attach_prefix(request)
            count = self._ask(request, step)
            is_short = count > 0 and memory.num_missing_blocks(request, count) > 0
            if count == 0 or is_short or not self._start(request, count, step, memory):
                if request.status is not RequestStatus.SWAPPED:
                    memory.release(request)
                if is_short:
                    return True
                passed.add(request)
        return False

    def _next(self, passed: set[RequestState]) -> RequestState | None:
        """The first request that waits, is not held and was not passed over, of the tenant that was served least."""
        for account in sorted(self._accounts.values(), key=lambda account: account.served):
            for request in account.waiting:
                if not request.is_held and request not in passed:
                    return request
        return None

    def _start(self, request: RequestState, count: int, step: _Step, memory: KVMemory) -> bool:
        """Whether the request runs now."""
        is_swapped = request.status is RequestStatus.SWAPPED
        if is_swapped:
            memory.swap_in(request)
        granted = memory.grant(request, count)
        if granted or is_swapped:
            self._account(request).waiting.remove(request)
            self._running.append(request)
            request.status = RequestStatus.RUNNING
            self._take(request, granted, step)
        return request.status is RequestStatus.RUNNING

    def _ask(self, request: RequestState, step: _Step) -> int:
        """Tokens to ask for, at most what the limits leave; a prompt is computed in part alone."""
        limits = self.limits
        known = request.num_tokens - request.num_computed_tokens
        count = min(request.num_wanted_tokens, step.left)
        if limits.enable_chunked_prefill and 0 < limits.long_prefill_token_threshold < known:
            count = min(count, limits.long_prefill_token_threshold)
        if count < known and step.has_part:
            return 0
        if not limits.enable_chunked_prefill and count < known <= limits.max_num_batched_tokens:
            return 0
        return count

    def _take(self, request: RequestState, granted: int, step: _Step) -> None:
        if granted:
            step.schedule.requests.append(request)
            step.schedule.num_tokens.append(granted)
            step.left -= granted
            step.has_part |= granted < request.num_tokens - request.num_computed_tokens
            self._account(request).served += self._tenants.weighted(self._tenants.name(request), granted)

    def _last_held(self) -> RequestState | None:
        return next((request for request in reversed(self._running) if request.is_held), None)

    def _preempt(self, request: RequestState, schedule: Schedule, memory: KVMemory) -> None:
        if memory.swap_out(request):
            request.status = RequestStatus.SWAPPED
        else:
            memory.release(request)
            request.status = RequestStatus.PREEMPTED
        self._running.remove(request)
        self._account(request).waiting.appendleft(request)
        schedule.preempted.append(request)
