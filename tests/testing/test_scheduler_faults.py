"""What the scheduler suite finds, and what it leaves to policies: each a change in a scheduler that passes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from dovetail.contracts.scheduler import KVMemory, RequestState, RequestStatus, Schedule, Scheduler, SchedulerLimits
from dovetail.schedulers.batching import BatchingOptions, BatchingScheduler
from dovetail.schedulers.fcfs import FCFSScheduler
from dovetail.schedulers.ranked_queue import Rank, RankedQueue
from dovetail.testing.faults import Fault, check_fault, run_test
from dovetail.testing.scheduler_suite import SchedulerSuite


def with_limits(**changes: Any) -> type[Scheduler]:
    """FCFS that reads other limits than it is given; an integer is added to the one given."""

    class Misread(FCFSScheduler):
        def __init__(self, options: BatchingOptions, limits: SchedulerLimits):
            read = {
                name: value if isinstance(value, bool) else vars(limits)[name] + value
                for name, value in changes.items()
            }
            super().__init__(options, replace(limits, **{name: max(value, 0) for name, value in read.items()}))

    return Misread


class OneSeatFewer(FCFSScheduler):
    def __init__(self, options: BatchingOptions, limits: SchedulerLimits):
        super().__init__(options, replace(limits, max_num_seqs=max(1, limits.max_num_seqs - 1)))


class WithoutDrafts(FCFSScheduler):
    def schedule(self, memory: KVMemory) -> Schedule:
        for request in self._running.requests:
            request.num_draft_tokens = 0
        return super().schedule(memory)


class Quiet(FCFSScheduler):
    def schedule(self, memory: KVMemory) -> Schedule:
        schedule = super().schedule(memory)
        schedule.preempted = []
        return schedule


class NobodyGivesWay(FCFSScheduler):
    def _make_room(self, request: RequestState, count: int, step: Any, memory: KVMemory) -> int:
        return 0


class Idle(FCFSScheduler):
    """Rests in every other step."""

    rests: ClassVar[bool] = False

    def schedule(self, memory: KVMemory) -> Schedule:
        self.rests = not self.rests
        return super().schedule(memory) if self.rests else Schedule()


class KeepsTheRemoved(FCFSScheduler):
    def remove(self, request: RequestState) -> None:
        if request.status is not RequestStatus.PREEMPTED:
            super().remove(request)


class CallsEverythingSwapped(FCFSScheduler):
    def schedule(self, memory: KVMemory) -> Schedule:
        schedule = super().schedule(memory)
        for request in schedule.preempted:
            request.status = RequestStatus.SWAPPED
        return schedule


class Memory:
    """What a scheduler is handed, but for one method."""

    def __init__(self, memory: KVMemory, **methods: Any):
        self._memory, self._methods = memory, methods

    def __getattr__(self, name: str) -> Any:
        return self._methods.get(name) or getattr(self._memory, name)


class LooksNothingUp(FCFSScheduler):
    def schedule(self, memory: KVMemory) -> Schedule:
        return super().schedule(Memory(memory, attach_prefix=lambda request: 0))


class GivesNoBlocksBack(FCFSScheduler):
    def schedule(self, memory: KVMemory) -> Schedule:
        return super().schedule(Memory(memory, release=lambda request: None))


class SkipsAllocation(FCFSScheduler):
    """Once a request runs."""

    def _continue_running(self, step: Any, memory: KVMemory) -> None:
        super()._continue_running(step, Memory(memory, allocate=lambda *arguments: True))


class Twice(FCFSScheduler):
    def schedule(self, memory: KVMemory) -> Schedule:
        schedule = super().schedule(memory)
        if len(schedule.requests) == 1 and sum(schedule.num_tokens) == 1:
            schedule.requests *= 2
            schedule.num_tokens *= 2
        return schedule


class RefusesLongPrompts(FCFSScheduler):
    def add(self, request: RequestState) -> None:
        if request.num_prompt_tokens > self.limits.max_model_len - 7:
            raise ValueError("too long")
        super().add(request)


class WritesCounts(FCFSScheduler):
    def add(self, request: RequestState) -> None:
        request.num_cached_tokens, request.num_preemptions = 7, 3
        super().add(request)


class CountsPreemptions(FCFSScheduler):
    def schedule(self, memory: KVMemory) -> Schedule:
        schedule = super().schedule(memory)
        for request in schedule.preempted:
            request.num_preemptions += 1
        return schedule


class OneTable(FCFSScheduler):
    """For all schedulers of the process, by the names of requests."""

    table: ClassVar[dict[str, Rank]] = {}

    def rank(self, request: RequestState) -> Rank:
        return self.table.setdefault(request.request_id, (len(self.table),))

    def remove(self, request: RequestState) -> None:
        del self.table[request.request_id]
        super().remove(request)


class OneQueue(FCFSScheduler):
    """For all schedulers of the process."""

    queue: ClassVar[RankedQueue] = RankedQueue()

    def __init__(self, options: BatchingOptions, limits: SchedulerLimits):
        super().__init__(options, limits)
        self._waiting = OneQueue.queue


class ShufflesByTheProcess(FCFSScheduler):
    def schedule(self, memory: KVMemory) -> Schedule:
        random.seed(0)
        return super().schedule(memory)


FAULTS = [
    Fault(
        "computes a token more than a step may", with_limits(max_num_batched_tokens=1), "test_long_prompt_is_chunked"
    ),
    Fault("runs a request more than it may", with_limits(max_num_seqs=1), "test_every_seat_is_taken"),
    Fault("leaves a seat empty", OneSeatFewer, "test_every_seat_is_taken"),
    Fault(
        "ignores max_num_partial_prefills",
        with_limits(max_num_partial_prefills=9),
        "test_prompts_in_part_are_as_few_as_the_limits_say",
    ),
    Fault(
        "ignores max_long_partial_prefills",
        with_limits(max_long_partial_prefills=9),
        "test_prompts_in_part_are_as_few_as_the_limits_say",
    ),
    Fault(
        "ignores long_prefill_token_threshold",
        with_limits(long_prefill_token_threshold=-99),
        "test_prompts_in_part_are_as_few_as_the_limits_say",
    ),
    Fault(
        "chunks prompts that are to be whole",
        with_limits(enable_chunked_prefill=True),
        "test_prompt_waits_or_is_whole_without_chunking",
    ),
    Fault("never computes drafts", WithoutDrafts, "test_drafts_are_computed_where_they_fit"),
    Fault("does not say who gave way", Quiet, "test_finishes_in_memory_for_one"),
    Fault("has nobody give way", NobodyGivesWay, "test_finishes_in_memory_for_one"),
    Fault("schedules nothing though requests wait", Idle, "test_one_request_runs_to_its_end"),
    Fault("keeps aborted requests that were preempted", KeepsTheRemoved, "test_abort_in_every_status[recompute]"),
    Fault("says swapped of what it released", CallsEverythingSwapped, "test_finishes_in_memory_for_one[recompute]"),
    Fault("never looks for cached prefixes", LooksNothingUp, "test_cached_prefix_is_not_computed_again"),
    Fault("gives no blocks back", GivesNoBlocksBack, "test_finishes_in_memory_for_one[recompute]"),
    Fault("computes tokens without blocks", SkipsAllocation, "test_one_request_runs_to_its_end"),
    Fault("schedules a request twice", Twice, "test_one_request_runs_to_its_end"),
    Fault("refuses prompts below max_model_len", RefusesLongPrompts, "test_request_of_max_model_len_runs"),
    Fault("writes the counts of a new request", WritesCounts, "test_one_request_runs_to_its_end"),
    Fault("counts preemptions itself", CountsPreemptions, "test_finishes_in_memory_for_one"),
    Fault("shares a table with others", OneTable, "test_schedulers_of_one_process_do_not_meet"),
    Fault("shares a queue with others", OneQueue, "test_schedulers_of_one_process_do_not_meet"),
    Fault("seeds the random generator of the process", ShufflesByTheProcess, "test_leaves_random_generators_alone"),
]


def creating(scheduler: type[BatchingScheduler]) -> Any:
    return lambda suite, limits: scheduler(BatchingOptions(), limits)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_scheduler_that(fault: Fault) -> None:
    check_fault(fault, SchedulerSuite, create_scheduler=creating(fault.plugin))


class LastInFirstOut(FCFSScheduler):
    def rank(self, request: RequestState) -> Rank:
        return (-self._num_added,)


class HalfOfThemLast(FCFSScheduler):
    """Lets requests of odd length in when no other waits."""

    def rank(self, request: RequestState) -> Rank:
        return (request.num_prompt_tokens % 2,)


class ReturnsLast(FCFSScheduler):
    """Who gave way comes back behind all that wait."""

    statuses: ClassVar[tuple[RequestStatus, ...]] = (RequestStatus.PREEMPTED, RequestStatus.SWAPPED)

    def _preempt(self, victim: RequestState, step: Any, memory: KVMemory) -> None:
        super()._preempt(victim, step, memory)
        if victim.status in self.statuses:
            self._waiting.remove(self._ranks[victim])
            self._ranks[victim] = rank = (10**6 + self._num_added,)
            self._num_added += 1
            self._waiting.add(victim, rank)


class SwappedReturnLast(ReturnsLast):
    statuses = (RequestStatus.SWAPPED,)


@pytest.mark.parametrize("policy", [FCFSScheduler, LastInFirstOut, HalfOfThemLast, ReturnsLast, SwappedReturnLast])
@pytest.mark.parametrize("test", sorted({fault.test.partition("[")[0] for fault in FAULTS}))
def test_the_suite_leaves_the_order_to_policies(policy: type[BatchingScheduler], test: str) -> None:
    outcome = run_test(SchedulerSuite, test, create_scheduler=creating(policy))
    assert outcome.passed
    assert not outcome.failed
