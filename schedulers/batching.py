"""Continuous batching with chunked prefill, preemption and swapping; policies differ in the order of requests.

Every step first serves running requests, then admits waiting ones, both in order of rank. Orca (Yu et al., OSDI 2022)
schedules by iteration in this way, Sarathi-Serve (Agrawal et al., OSDI 2024) splits prompts so that decodes never wait
for a long one.

`BatchingScheduler` is a public base for schedulers of other distributions: a policy implements `rank`, and `outranks`
if waiting requests may displace running ones. Names with a leading underscore may change in any version.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

from pydantic import Field

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.scheduler import KVMemory, RequestState, RequestStatus, Schedule, Scheduler, SchedulerLimits
from dovetail.schedulers.ranked_queue import Rank, RankedQueue


class BatchingOptions(PluginOptions):
    """Options of the schedulers that batch continuously. A subclass may add its own."""

    preemption_mode: Literal["auto", "recompute"] = "auto"
    """How a request is preempted. "auto": its blocks are swapped to host memory where that has space, else recomputed;
    "recompute": always recomputed."""
    watermark: float = Field(default=0.01, ge=0, lt=1)
    """Fraction of the blocks that stays free when a request is admitted with others, so that those are not preempted
    again at once."""


class _Admission(Enum):
    """The outcome of trying to admit a waiting request."""

    ADMITTED = "admitted"
    PASSED_OVER = "passed over"
    """The request waits for something that does not concern those behind it."""
    HOLDS_BACK = "holds back"
    """The request waits for blocks or budget that those behind it would take."""


@dataclass(slots=True, kw_only=True)
class _Step(Schedule):
    """The schedule of one step while it is made, with its remaining budgets."""

    left: int
    """Number of tokens that the step may still compute."""
    num_partial: int = 0
    num_long: int = 0
    is_short: bool = False
    """A request waits for blocks, or for another running request to end."""

    def chunk(self, limits: SchedulerLimits, num_known: int, at_most: int) -> int:
        """Returns how many of a prompt's `num_known` tokens to ask for; 0 where no more prompts may be computed in
        part."""
        is_long = _is_long(limits, num_known)
        count = min(num_known, at_most, limits.long_prefill_token_threshold if is_long else num_known)
        if count < num_known:
            if self.num_partial >= limits.max_num_partial_prefills:
                return 0
            if is_long and self.num_long >= limits.max_long_partial_prefills:
                return 0
        return count

    def take(self, limits: SchedulerLimits, request: RequestState, granted: int) -> None:
        """Adds a request with the tokens that it was granted."""
        self.requests.append(request)
        self.num_tokens.append(granted)
        self.left -= granted
        self._count_partial(limits, request, granted, 1)

    def withdraw(self, limits: SchedulerLimits, request: RequestState) -> None:
        """Removes a request from the schedule, before its counts change."""
        if request not in self.requests:
            return
        index = self.requests.index(request)
        granted = self.num_tokens[index]
        del self.requests[index], self.num_tokens[index]
        self.left += granted
        self._count_partial(limits, request, granted, -1)

    def _count_partial(self, limits: SchedulerLimits, request: RequestState, granted: int, change: int) -> None:
        num_known = request.num_tokens - request.num_computed_tokens
        if granted < num_known:
            self.num_partial += change
            self.num_long += change * _is_long(limits, num_known)


def _is_long(limits: SchedulerLimits, num_known: int) -> bool:
    return limits.enable_chunked_prefill and 0 < limits.long_prefill_token_threshold < num_known


class BatchingScheduler(Scheduler):
    """The algorithm without an order. Subclasses implement `rank`, and `outranks` if waiting requests may displace
    others::

        class ShortestPromptFirst(BatchingScheduler):
            def rank(self, request):
                return (request.num_prompt_tokens,)

    The running request of best rank that is not held is never preempted for blocks, so it finishes, then the next one:
    every request finishes. Requests are preempted in order of rank, the last first, held ones like others. A held
    request of better rank is preempted only where otherwise no request could run.
    """

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options: ClassVar[type[PluginOptions]] = BatchingOptions

    def __init__(self, options: BatchingOptions, limits: SchedulerLimits):
        super().__init__(options, limits)
        self._swaps = options.preemption_mode == "auto"
        self._watermark = options.watermark
        self._running = RankedQueue()
        self._waiting = RankedQueue()
        self._ranks: dict[RequestState, Rank] = {}
        self._num_added = 0

    @abstractmethod
    def rank(self, request: RequestState) -> Rank:
        """Returns the sort key of a request, lower first; equal ranks are ordered by arrival. Called once, when the
        request is added: it must not depend on what changes later."""

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        """Returns whether `waiting` may be admitted in place of `running`, which is then preempted. Must be a strict
        order that agrees with `rank`: a request never displaces one of better rank, whatever this says, so that two
        cannot displace each other in turn."""
        return False

    @property
    def num_running(self) -> int:
        """Requests with status RUNNING."""
        return len(self._running.requests)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait, were preempted, or are swapped out."""
        return len(self._waiting.requests)

    def add(self, request: RequestState) -> None:
        """Adds a new request. Raises `ValueError` where its rank contains NaN."""
        rank = (*self.rank(request), self._num_added)
        self._waiting.add(request, rank)
        self._num_added += 1
        self._ranks[request] = rank

    def remove(self, request: RequestState) -> None:
        """Forgets a request. Raises `KeyError` for one that is not here, and `RuntimeError` where its rank does not
        find it."""
        rank = self._ranks.pop(request)
        if not self._running.remove(rank) and not self._waiting.remove(rank):
            raise RuntimeError(
                f"request {request.request_id} is in no queue under its rank {rank}: a rank must not change"
            )

    def schedule(self, memory: KVMemory) -> Schedule:
        """Schedules one step: running requests go on, then waiting ones are admitted, unless a request was
        preempted."""
        step = _Step(left=self.limits.max_num_batched_tokens)
        if self._running.requests:
            self._continue_running(step, memory)
        if self._waiting.requests and not step.preempted:
            self._admit_waiting(step, memory)
        while not step.requests and step.is_short and (held := self._last_held()) is not None:
            # No request could run, and held requests have the missing blocks.
            self._preempt(held, step, memory)
            step.is_short = False
            self._continue_running(step, memory)
            self._admit_waiting(step, memory)
        return step

    def _continue_running(self, step: _Step, memory: KVMemory) -> None:
        self._serve(step, memory, sets_aside=True)
        if not step.requests:
            # The budget that was set aside was not used: the first request may need the whole step for tokens that must
            # not be cut.
            self._serve(step, memory, sets_aside=False)

    def _serve(self, step: _Step, memory: KVMemory, sets_aside: bool) -> None:
        running, grant = self._running.requests, memory.grant
        requests, counts = step.requests, step.num_tokens
        spare: int | None = None if sets_aside else step.left - 1
        left = step.left
        for request in running:  # Those that are preempted leave at the end, which a list iterator allows.
            if left == 0:
                break
            if request.is_held:
                continue
            count = request.num_tokens + request.num_draft_tokens - request.num_computed_tokens
            if count == 1 and grant(request, 1):
                requests.append(request)
                counts.append(1)
                left -= 1
                continue
            if spare is None:
                spare = self._spare(step, left)
            step.left = left
            granted = self._serve_many(request, min(count, 1 + spare, left), step, memory)
            spare -= max(0, granted - 1)
            left = step.left
        step.left = left

    def _spare(self, step: _Step, left: int) -> int:
        """Returns the budget beyond one token for each running request, so that drafts and prompts of some requests
        never stop the decodes of others."""
        num_served = len(step.requests)
        return max(0, left - sum(not request.is_held for request in self._running.requests) + num_served)

    def _serve_many(self, request: RequestState, at_most: int, step: _Step, memory: KVMemory) -> int:
        """Schedules a running request that does not want exactly one token (a prompt's next chunk, or a token and
        drafts), or for which blocks are short. Returns the number of tokens that it computes."""
        num_known = request.num_tokens - request.num_computed_tokens
        count = step.chunk(self.limits, num_known, at_most) if num_known > 1 else at_most
        if count == 0:
            return 0
        granted = memory.grant(request, count) or self._preempt_for(request, count, step, memory)
        if granted:
            step.take(self.limits, request, granted)
        return granted

    def _preempt_for(self, request: RequestState, count: int, step: _Step, memory: KVMemory) -> int:
        """Handles a running request that was granted no tokens. If blocks are short, drops its drafts, then preempts
        other requests, and the request itself last. Returns the number of tokens that it is then granted."""
        num_known = request.num_tokens - request.num_computed_tokens
        if count > num_known:
            count = num_known
            if granted := memory.grant(request, count):
                return granted
        while memory.num_missing_blocks(request, count):
            victim = self._victim(request, step)
            self._preempt(victim, step, memory)
            if victim is request:
                return 0
            if granted := memory.grant(request, count):
                return granted
        return 0

    def _victim(self, request: RequestState, step: _Step) -> RequestState:
        """Returns the last running request; where that is `request` itself and no other runs in this step, a held
        one."""
        last = self._running.requests[-1]
        if last is request and not step.requests:
            return self._last_held() or last
        return last

    def _last_held(self) -> RequestState | None:
        """The held request of worst rank among those that run."""
        return next((request for request in reversed(self._running.requests) if request.is_held), None)

    def _preempt(self, victim: RequestState, step: _Step, memory: KVMemory) -> None:
        step.withdraw(self.limits, victim)
        if self._swaps and memory.swap_out(victim):
            victim.status = RequestStatus.SWAPPED
        else:
            memory.release(victim)
            victim.status = RequestStatus.PREEMPTED
        rank = self._ranks[victim]
        self._running.remove(rank)
        self._waiting.add(victim, rank)
        step.preempted.append(victim)

    def _admit_waiting(self, step: _Step, memory: KVMemory) -> None:
        """Admits requests in order. The first request for which blocks are short holds back those behind it, so that it
        does not starve. A request that is held, or waits for another long prompt or for a shared prefix, does not.
        """
        waiting = self._waiting.requests
        index = num_passed = 0
        # Requests that are passed over stay in the queue; a bound keeps a queue full of them cheap.
        while step.left > 0 and index < len(waiting) and num_passed < self.limits.max_num_seqs:
            request = waiting[index]
            if request.is_held:
                index += 1
                continue
            if request in step.preempted or self._is_kept_out(request):
                step.is_short = True
                break
            admission = self._admit(request, step, memory)
            if admission is _Admission.HOLDS_BACK:
                break
            if admission is _Admission.PASSED_OVER:
                index += 1
                num_passed += 1

    def _is_kept_out(self, request: RequestState) -> bool:
        """Whether the most requests run and the request outranks none of them, so that its prefix need not be looked
        up."""
        running = self._running.requests
        return len(running) >= self.limits.max_num_seqs and not self._displaces(request, running[-1])

    def _displaces(self, waiting: RequestState, running: RequestState) -> bool:
        return self.outranks(waiting, running) and self._ranks[waiting] < self._ranks[running]

    def _admit(self, request: RequestState, step: _Step, memory: KVMemory) -> _Admission:
        if request.status is RequestStatus.SWAPPED:
            return self._bring_back(request, step, memory)
        if memory.awaits_prefix(request):
            return _Admission.PASSED_OVER
        memory.attach_prefix(request)
        num_known = request.num_tokens - request.num_computed_tokens
        count = self._first_chunk(num_known, step)
        if not count:
            admission = self._not_in_part(num_known)
        elif not self._find_blocks(request, count, step, memory):
            admission = _Admission.HOLDS_BACK
        elif granted := memory.grant(request, count, self._reserve(request, count, step, memory)):
            self._start(request)
            step.take(self.limits, request, granted)
            return _Admission.ADMITTED
        else:
            # The host refuses. A whole prompt waits for what only the host knows; a part of one may be too small.
            admission = _Admission.PASSED_OVER if count == num_known else _Admission.HOLDS_BACK
        memory.release(request)
        return admission

    def _bring_back(self, request: RequestState, step: _Step, memory: KVMemory) -> _Admission:
        """Admits a swapped request. If it is granted no tokens, it runs from the next step on."""
        num_known = request.num_tokens - request.num_computed_tokens
        count = self._first_chunk(num_known, step)
        if not count:
            return self._not_in_part(num_known)
        if not self._find_blocks(request, count, step, memory) or not memory.swap_in(request):
            return _Admission.HOLDS_BACK
        self._start(request)
        if granted := memory.grant(request, count):
            step.take(self.limits, request, granted)
        return _Admission.ADMITTED

    def _first_chunk(self, num_known: int, step: _Step) -> int:
        limits = self.limits
        # A prompt longer than any step could never be computed in one; it is split even where prompts are not to be.
        if not limits.enable_chunked_prefill and step.left < num_known <= limits.max_num_batched_tokens:
            return 0
        return step.chunk(self.limits, num_known, step.left)

    def _find_blocks(self, request: RequestState, count: int, step: _Step, memory: KVMemory) -> bool:
        """Returns whether a waiting request gets blocks for `count` tokens and may run. Preempts requests that it
        outranks if need be: no more than necessary, and none where all would not be enough."""
        running = self._running.requests
        victims: list[RequestState] = []
        while len(running) - len(victims) >= self.limits.max_num_seqs or memory.num_missing_blocks(
            request, count, self._reserve(request, count, step, memory, victims), victims
        ):
            step.is_short = True
            if len(victims) == len(running) or not self._displaces(request, running[-1 - len(victims)]):
                return False
            victims.append(running[-1 - len(victims)])
        for victim in victims:
            self._preempt(victim, step, memory)
        return True

    def _reserve(
        self,
        request: RequestState,
        count: int,
        step: _Step,
        memory: KVMemory,
        without: Sequence[RequestState] = (),
    ) -> int:
        """Returns the blocks that stay free when a request is admitted with others: the watermark, and blocks for the
        rest of its prompt; none on account of requests that it outranks. `without`: the last running requests, which
        count as preempted."""
        running = self._running.requests
        if len(without) < len(running) and self._displaces(request, running[-1 - len(without)]):
            return 0
        if all(other in without for other in step.requests):
            return 0
        rest = request.num_tokens - request.num_computed_tokens - count
        return int(self._watermark * memory.num_blocks) - (-rest // memory.block_size)

    def _start(self, request: RequestState) -> None:
        rank = self._ranks[request]
        self._waiting.remove(rank)
        self._running.add(request, rank)
        request.status = RequestStatus.RUNNING

    def _not_in_part(self, num_known: int) -> _Admission:
        """How a prompt waits that cannot be computed in part now: a long one lets others overtake it."""
        return _Admission.PASSED_OVER if _is_long(self.limits, num_known) else _Admission.HOLDS_BACK
