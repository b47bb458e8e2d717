"""Continuous batching with chunked prefill, preemption and swapping; what differs between policies is the order.

Every step serves the requests that run first, then lets waiting ones in, each in order of rank. Orca (Yu et al.,
OSDI 2022) schedules by iteration in this way, Sarathi-Serve (Agrawal et al., OSDI 2024) splits prompts so that
decodes never wait for a long one.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import Field

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.scheduler import KVMemory, RequestState, RequestStatus, Schedule, Scheduler, SchedulerLimits
from dovetail.schedulers.ranked_queue import Rank, RankedQueue


class BatchingOptions(PluginOptions):
    """Options of the schedulers that batch continuously."""

    preemption_mode: Literal["auto", "recompute"] = "auto"
    """What becomes of a request that gives way. "auto": it is swapped to host memory where there is room, else
    recomputed; "recompute": always recomputed."""
    watermark: float = Field(default=0.01, ge=0, lt=1)
    """Fraction of the blocks that stays free when a request is let in beside others, so that those do not have to
    give way again at once."""


@dataclass(slots=True)
class _Step:
    """What one step has given out so far."""

    limits: SchedulerLimits
    left: int
    """Tokens that may still be computed."""
    schedule: Schedule = field(default_factory=Schedule)
    num_partial: int = 0
    num_long: int = 0

    def is_long(self, num_known: int) -> bool:
        limits = self.limits
        return limits.enable_chunked_prefill and 0 < limits.long_prefill_token_threshold < num_known

    def chunk(self, num_known: int, at_most: int) -> int:
        """How many of a prompt's `num_known` tokens to compute; 0 where no more prompts may be computed in part."""
        is_long = self.is_long(num_known)
        count = min(num_known, at_most, self.limits.long_prefill_token_threshold if is_long else num_known)
        if count < num_known:
            if self.num_partial >= self.limits.max_num_partial_prefills:
                return 0
            if is_long and self.num_long >= self.limits.max_long_partial_prefills:
                return 0
            self.num_partial += 1
            self.num_long += is_long
        return count

    def withdraw(self, request: RequestState) -> None:
        """Takes back what a request was given, before its counts change."""
        schedule = self.schedule
        if request not in schedule.requests:
            return
        index = schedule.requests.index(request)
        count = schedule.num_tokens[index]
        del schedule.requests[index], schedule.num_tokens[index]
        self.left += count
        num_known = request.num_tokens - request.num_computed_tokens
        if count < num_known:
            self.num_partial -= 1
            self.num_long -= self.is_long(num_known)


class BatchingScheduler(Scheduler):
    """The algorithm without an order. Subclasses say `rank`, and `outranks` if waiting requests may displace others.

    The running request of best rank is never preempted, so it finishes, and then the next: every request gets done.
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
        """Sorts requests, lower first; equal ranks go by order of arrival here."""

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        """Whether `waiting` may take the place of `running`. Must be a strict order."""
        return False

    @property
    def num_running(self) -> int:
        """Requests with status RUNNING."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, were preempted, or are swapped out."""
        return len(self._waiting)

    def add(self, request: RequestState) -> None:
        """Takes in a new request."""
        rank = (*self.rank(request), self._num_added)
        self._num_added += 1
        self._ranks[request] = rank
        self._waiting.add(request, rank)

    def remove(self, request: RequestState) -> None:
        """Forgets a request. Raises `KeyError` for one that is not here."""
        rank = self._ranks.pop(request)
        if not self._running.remove(rank):
            self._waiting.remove(rank)

    def schedule(self, memory: KVMemory) -> Schedule:
        """One step: what runs goes on, then what waits comes in, unless somebody had to give way."""
        step = _Step(self.limits, self.limits.max_num_batched_tokens)
        if self._running.requests:
            self._continue_running(step, memory)
        if self._waiting.requests and not step.schedule.preempted:
            self._let_in(step, memory)
        return step.schedule

    def _continue_running(self, step: _Step, memory: KVMemory) -> None:
        running = self._running.requests
        allocate = memory.allocate
        requests, counts = step.schedule.requests, step.schedule.num_tokens
        left = step.left
        # One token is set aside for each, so that drafts and prompts of some never stop the decodes of others.
        spare = max(0, left - len(running))
        for request in running:  # Victims leave at the end, which a list iterator allows.
            if left == 0:
                break
            count = request.num_tokens + request.num_draft_tokens - request.num_computed_tokens
            if count != 1:
                count = self._grant(request, spare, step)
                if count == 0:
                    continue
                spare -= count - 1
            if not allocate(request, count):
                count = self._make_room(request, count, step, memory)
                if count == 0:
                    break
            requests.append(request)
            counts.append(count)
            left -= count
        step.left = left

    def _grant(self, request: RequestState, spare: int, step: _Step) -> int:
        """Tokens for a running request that wants other than one: a prompt's next chunk, or a token and drafts."""
        num_known = request.num_tokens - request.num_computed_tokens
        if num_known > 1:
            return step.chunk(num_known, 1 + spare)
        return num_known + min(request.num_draft_tokens, spare)

    def _make_room(self, request: RequestState, count: int, step: _Step, memory: KVMemory) -> int:
        """Blocks are short: drops the request's drafts, then preempts from the end, itself last. Returns the tokens
        that the request computes; 0: it gave way."""
        num_known = request.num_tokens - request.num_computed_tokens
        if count > num_known:
            count = num_known
            if memory.allocate(request, count):
                return count
        while True:
            victim = self._running.requests[-1]
            self._preempt(victim, step, memory)
            if victim is request:
                return 0
            if memory.allocate(request, count):
                return count

    def _preempt(self, victim: RequestState, step: _Step, memory: KVMemory) -> None:
        step.withdraw(victim)
        if self._swaps and memory.swap_out(victim):
            victim.status = RequestStatus.SWAPPED
        else:
            memory.release(victim)
            victim.status = RequestStatus.PREEMPTED
        rank = self._ranks[victim]
        self._running.remove(rank)
        self._waiting.add(victim, rank)
        step.schedule.preempted.append(victim)

    def _let_in(self, step: _Step, memory: KVMemory) -> None:
        """Admits requests in order. The first that finds no room holds back those behind it, lest it starve; one
        that only waits for another long prompt, or for another to compute the prefix they share, does not."""
        waiting = self._waiting.requests
        index = 0
        # Requests that are passed over stay in the queue; a bound keeps a queue full of them cheap.
        while step.left > 0 and index < min(len(waiting), self.limits.max_num_seqs):
            request = waiting[index]
            if request in step.schedule.preempted or self._is_kept_out(request):
                break
            is_swapped = request.status is RequestStatus.SWAPPED
            if not is_swapped:
                if memory.awaits_prefix(request):
                    index += 1
                    continue
                memory.attach_prefix(request)
            num_known = request.num_tokens - request.num_computed_tokens
            count = self._first_chunk(num_known, step)
            if count and self._find_place(request, count, step, memory):
                continue
            if not is_swapped:
                memory.release(request)
            if count or not step.is_long(num_known):
                break
            index += 1

    def _is_kept_out(self, request: RequestState) -> bool:
        """Whether every place is taken by requests that it does not outrank: looking for its prefix is for nothing."""
        running = self._running.requests
        return len(running) >= self.limits.max_num_seqs and not self.outranks(request, running[-1])

    def _first_chunk(self, num_known: int, step: _Step) -> int:
        limits = self.limits
        # A prompt longer than any step could never be computed in one; it is split even where prompts are not to be.
        if not limits.enable_chunked_prefill and step.left < num_known <= limits.max_num_batched_tokens:
            return 0
        return step.chunk(num_known, step.left)

    def _find_place(self, request: RequestState, count: int, step: _Step, memory: KVMemory) -> bool:
        """Admits `request` with `count` tokens, in the place of requests that it outranks if need be."""
        running = self._running.requests
        while len(running) >= self.limits.max_num_seqs or not self._take_blocks(request, count, memory):
            if not running or not self.outranks(request, running[-1]):
                return False
            self._preempt(running[-1], step, memory)
        was_swapped = request.status is RequestStatus.SWAPPED
        rank = self._ranks[request]
        self._waiting.remove(rank)
        self._running.add(request, rank)
        request.status = RequestStatus.RUNNING
        if was_swapped and not memory.allocate(request, count):
            return False  # It runs from the next step on; until then nobody overtakes it.
        step.schedule.requests.append(request)
        step.schedule.num_tokens.append(count)
        step.left -= count
        return True

    def _take_blocks(self, request: RequestState, count: int, memory: KVMemory) -> bool:
        """Takes blocks for the request's next `count` tokens, or brings its swapped blocks back."""
        reserve = 0
        if self._running.requests:
            # The rest of a prompt that is computed in part needs blocks soon, so they count as spoken for.
            rest = request.num_tokens - request.num_computed_tokens - count
            reserve = int(self._watermark * memory.num_blocks) - (-rest // memory.block_size)
        if request.status is not RequestStatus.SWAPPED:
            return memory.allocate(request, count, reserve)
        needed = -(-(request.num_computed_tokens + count) // memory.block_size) + reserve
        if self._running.requests and memory.num_free_blocks < needed:
            return False
        return memory.swap_in(request)
