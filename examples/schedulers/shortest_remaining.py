"""Shortest remaining time first: of all requests, those with the fewest tokens left run first.

A scheduler written from the contract alone (`dovetail.contracts.scheduler`); name it in a config::

    scheduler: examples/schedulers/shortest_remaining.py:ShortestRemainingFirst
"""

from __future__ import annotations

from typing import ClassVar

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.scheduler import KVMemory, RequestState, RequestStatus, Schedule, Scheduler, SchedulerLimits


class ShortestRemainingFirst(Scheduler):
    """Each step serves requests in order of the tokens that are left to them, prompt and output. Where blocks are
    short, the request with the most tokens left is preempted; for a place among those that run, only held ones are."""

    contract: ClassVar[tuple[int, int]] = (1, 0)

    def __init__(self, options: PluginOptions, limits: SchedulerLimits):
        super().__init__(options, limits)
        self._requests: list[RequestState] = []

    @property
    def num_running(self) -> int:
        """Requests with status RUNNING."""
        return sum(request.status is RequestStatus.RUNNING for request in self._requests)

    @property
    def num_waiting(self) -> int:
        """All others."""
        return len(self._requests) - self.num_running

    def add(self, request: RequestState) -> None:
        """Takes in a new request."""
        self._requests.append(request)

    def remove(self, request: RequestState) -> None:
        """Forgets a request."""
        self._requests.remove(request)

    def schedule(self, memory: KVMemory) -> Schedule:
        """Serves requests in order. The first that cannot be admitted holds back those behind it; what runs goes on."""
        self._requests.sort(key=_tokens_left)  # stable: equal ones in order of arrival
        step = _Step(self.limits)
        self._serve_all(step, memory)
        while not step.schedule.requests and step.is_short and (held := self._held()):
            _preempt(held, step, memory)
            self._serve_all(step, memory)
        return step.schedule

    def _serve_all(self, step: _Step, memory: KVMemory) -> None:
        step.is_short = False
        for request in self._requests:
            if step.left == 0:
                break
            if request.is_held or request in step.schedule.preempted:
                continue
            if request.status is RequestStatus.RUNNING:
                self._continue(request, step, memory)
            elif not step.is_short:
                self._admit(request, step, memory)

    def _continue(self, request: RequestState, step: _Step, memory: KVMemory) -> None:
        count = step.ask(request)
        if count == 0:
            return
        granted = memory.grant(request, count)
        while not granted and memory.num_missing_blocks(request, count):
            victim = self._victim(request, step)
            _preempt(victim, step, memory)
            if victim is request:
                return
            granted = memory.grant(request, count)
        step.take(request, granted)

    def _victim(self, request: RequestState, step: _Step) -> RequestState:
        """Of those behind `request`, the last that runs; a held one where nothing else could run; else itself."""
        behind = self._requests[self._requests.index(request) + 1 :]
        running = [other for other in behind if other.status is RequestStatus.RUNNING]
        if running:
            return running[-1]
        return (None if step.schedule.requests else self._held()) or request

    def _held(self) -> RequestState | None:
        held = (request for request in reversed(self._requests) if request.is_held)
        return next((request for request in held if request.status is RequestStatus.RUNNING), None)

    def _admit(self, request: RequestState, step: _Step, memory: KVMemory) -> None:
        if self.num_running == self.limits.max_num_seqs:
            step.is_short = True
            return
        is_swapped = request.status is RequestStatus.SWAPPED
        if not is_swapped:
            if memory.awaits_prefix(request):
                return
            memory.attach_prefix(request)
        count = step.ask(request)
        if count and memory.num_missing_blocks(request, count):
            step.is_short = True
        elif count:
            if is_swapped:
                memory.swap_in(request)
            granted = memory.grant(request, count)
            step.take(request, granted)
            if granted or is_swapped:
                request.status = RequestStatus.RUNNING
                return
        if not is_swapped:
            memory.release(request)


class _Step:
    """What is left of a step."""

    def __init__(self, limits: SchedulerLimits):
        self.schedule = Schedule()
        self.left = limits.max_num_batched_tokens
        self.is_short = False
        """A request waits for blocks or for a place; none behind it is admitted."""
        self._limits = limits
        self._num_partial = self._num_long = 0

    def ask(self, request: RequestState) -> int:
        """Tokens to ask for; 0: its prompt would be computed in part, and may not be."""
        limits = self._limits
        known = request.num_tokens - request.num_computed_tokens
        count = min(request.num_wanted_tokens, self.left)
        if not limits.enable_chunked_prefill:
            return 0 if count < known <= limits.max_num_batched_tokens or self._is_full(count, known) else count
        if self._is_long(known):
            count = min(count, limits.long_prefill_token_threshold)
        return 0 if self._is_full(count, known) else count

    def take(self, request: RequestState, granted: int) -> None:
        """Adds a request to the schedule, if it was granted tokens."""
        if granted:
            known = request.num_tokens - request.num_computed_tokens
            self.schedule.requests.append(request)
            self.schedule.num_tokens.append(granted)
            self.left -= granted
            self._num_partial += granted < known
            self._num_long += granted < known and self._is_long(known)

    def _is_long(self, known: int) -> bool:
        return self._limits.enable_chunked_prefill and 0 < self._limits.long_prefill_token_threshold < known

    def _is_full(self, count: int, known: int) -> bool:
        """Whether a prompt more may not be computed in part."""
        return count < known and (
            self._num_partial >= self._limits.max_num_partial_prefills
            or (self._is_long(known) and self._num_long >= self._limits.max_long_partial_prefills)
        )


def _tokens_left(request: RequestState) -> int:
    return request.num_prompt_tokens + request.max_tokens - request.num_computed_tokens


def _preempt(request: RequestState, step: _Step, memory: KVMemory) -> None:
    if memory.swap_out(request):
        request.status = RequestStatus.SWAPPED
    else:
        memory.release(request)
        request.status = RequestStatus.PREEMPTED
    step.schedule.preempted.append(request)
