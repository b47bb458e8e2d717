"""What the scheduler suite finds, and what it leaves to policies: each a change in a scheduler that passes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from dovetail.contracts.scheduler import (
    KVMemory,
    RequestState,
    RequestStatus,
    Schedule,
    Scheduler,
    SchedulerCapabilities,
    SchedulerLimits,
)
from dovetail.schedulers.batching import BatchingOptions, BatchingScheduler
from dovetail.schedulers.fcfs import FCFSScheduler
from dovetail.schedulers.ranked_queue import Rank, RankedQueue
from dovetail.testing.capabilities import Capability
from dovetail.testing.faults import Fault, check_fault, run_test
from dovetail.testing.hints import try_capability
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


class OneFewer(FCFSScheduler):
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


class PreemptsNobody(FCFSScheduler):
    def _preempt_for(self, request: RequestState, count: int, step: Any, memory: KVMemory) -> int:
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
        super()._continue_running(step, Memory(memory, grant=lambda request, num_tokens: num_tokens))


class UsesWhatItAskedFor(FCFSScheduler):
    """Takes any grant for a grant of all."""

    def schedule(self, memory: KVMemory) -> Schedule:
        return super().schedule(Memory(memory, grant=lambda *asked: asked[1] if memory.grant(*asked) else 0))


class LeavesTokensUnused(FCFSScheduler):
    """Of what it was granted."""

    def schedule(self, memory: KVMemory) -> Schedule:
        return super().schedule(Memory(memory, grant=lambda *asked: memory.grant(*asked) and 1))


class PreemptsWhenRefused(FCFSScheduler):
    """Takes every refusal for a want of blocks."""

    def _preempt_for(self, request: RequestState, count: int, step: Any, memory: KVMemory) -> int:
        return super()._preempt_for(request, count, step, Memory(memory, num_missing_blocks=lambda *asked: 1))


class TriesAgainAndAgain(FCFSScheduler):
    """With a few tokens more than half of the step, which never hold what must not be cut."""

    def _serve(self, step: Any, memory: KVMemory, sets_aside: bool) -> None:
        super()._serve(step, memory, sets_aside=True)


class IgnoresHolds(FCFSScheduler):
    """Counts what a held request would want."""

    def schedule(self, memory: KVMemory) -> Schedule:
        held = [request for request in self._ranks if request.is_held]
        for request in held:
            request.is_held = False
        schedule = super().schedule(memory)
        for request in held:
            request.is_held = True
        return schedule


class PreemptsHeldRequests(FCFSScheduler):
    """At once, whoever needs their blocks or not."""

    def _continue_running(self, step: Any, memory: KVMemory) -> None:
        for request in list(self._running.requests):
            if request.is_held:
                self._preempt(request, step, memory)
        super()._continue_running(step, memory)


class DropsDraftsOfHeldRequests(FCFSScheduler):
    def schedule(self, memory: KVMemory) -> Schedule:
        for request in self._ranks:
            if request.is_held:
                request.num_draft_tokens = 0
        return super().schedule(memory)


class WaitsForHeldRequests(FCFSScheduler):
    """Admits nobody behind one that is held."""

    def _admit_waiting(self, step: Any, memory: KVMemory) -> None:
        if not self._waiting.requests[0].is_held:
            super()._admit_waiting(step, memory)


class LooksAtFew(FCFSScheduler):
    """Held requests among the first that wait keep it from looking further."""

    def _admit_waiting(self, step: Any, memory: KVMemory) -> None:
        if not all(request.is_held for request in self._waiting.requests[: self.limits.max_num_seqs]):
            super()._admit_waiting(step, memory)


class NeverPreemptsHeldRequests(FCFSScheduler):
    def _last_held(self) -> None:
        return None


class KeepsHeldRequests(FCFSScheduler):
    def remove(self, request: RequestState) -> None:
        if not request.is_held:
            super().remove(request)


class NeedsATenant(FCFSScheduler):
    def rank(self, request: RequestState) -> Rank:
        return (len(request.extra.get("tenant", "")),)


class LimitsOutput(FCFSScheduler):
    def add(self, request: RequestState) -> None:
        request.max_tokens = min(request.max_tokens, 3)
        super().add(request)


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


class IgnoresPriorities(FCFSScheduler):
    capabilities = SchedulerCapabilities(priorities=True)


class LatestFirst(IgnoresPriorities):
    def rank(self, request: RequestState) -> Rank:
        return (-self._num_added,)


class HighestFirst(IgnoresPriorities):
    def rank(self, request: RequestState) -> Rank:
        return (-request.priority,)


class Leaks(FCFSScheduler):
    def __init__(self, options: BatchingOptions, limits: SchedulerLimits):
        super().__init__(options, limits)
        self.seen: list[RequestState] = []

    def add(self, request: RequestState) -> None:
        super().add(request)
        self.seen.append(request)


class AdmitsHalf(FCFSScheduler):
    """As many as half of `max_num_seqs`."""

    def __init__(self, options: BatchingOptions, limits: SchedulerLimits):
        super().__init__(options, replace(limits, max_num_seqs=max(1, limits.max_num_seqs // 2)))


class StopsForHeldRequests(FCFSScheduler):
    """Schedules nothing while one is held, and says that it waits for the host."""

    def schedule(self, memory: KVMemory) -> Schedule:
        if any(request.is_held for request in self._ranks):
            return Schedule()
        return super().schedule(memory)


FAULTS = [
    Fault("declares priorities and reads none", IgnoresPriorities, "test_better_priority_is_admitted_first[worse]"),
    Fault("takes the latest for the best priority", LatestFirst, "test_better_priority_is_admitted_first[better]"),
    Fault("runs higher priority numbers first", HighestFirst, "test_better_priority_is_admitted_first"),
    Fault("keeps every request for ever", Leaks, "test_forgets_requests_that_are_removed"),
    Fault("admits half as many as may run", AdmitsHalf, "test_held_requests_stop_nobody_for_want_of_a_place"),
    Fault("schedules nobody while one is held", StopsForHeldRequests, "test_held_request_keeps_what_it_has"),
    Fault(
        "computes a token more than a step may", with_limits(max_num_batched_tokens=1), "test_long_prompt_is_chunked"
    ),
    Fault("runs a request more than it may", with_limits(max_num_seqs=1), "test_as_many_run_as_may"),
    Fault("runs one request fewer than it may", OneFewer, "test_as_many_run_as_may"),
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
    Fault("does not say who was preempted", Quiet, "test_finishes_in_memory_for_one"),
    Fault("preempts nobody", PreemptsNobody, "test_finishes_in_memory_for_one"),
    Fault("schedules nothing though requests wait", Idle, "test_one_request_runs_to_its_end"),
    Fault("keeps aborted requests that were preempted", KeepsTheRemoved, "test_abort_in_every_status[recompute]"),
    Fault("says swapped of what it released", CallsEverythingSwapped, "test_finishes_in_memory_for_one[recompute]"),
    Fault("never looks for cached prefixes", LooksNothingUp, "test_cached_prefix_is_not_computed_again"),
    Fault("gives no blocks back", GivesNoBlocksBack, "test_finishes_in_memory_for_one[recompute]"),
    Fault("computes tokens without blocks", SkipsAllocation, "test_one_request_runs_to_its_end"),
    Fault("uses what it asked for", UsesWhatItAskedFor, "test_uses_what_is_granted"),
    Fault("uses fewer tokens than it was granted", LeavesTokensUnused, "test_one_request_runs_to_its_end"),
    Fault("preempts others when the host refuses", PreemptsWhenRefused, "test_uses_what_is_granted"),
    Fault("never asks for a whole step", TriesAgainAndAgain, "test_gets_a_span_that_takes_the_whole_step"),
    Fault("schedules held requests", IgnoresHolds, "test_held_request_keeps_what_it_has"),
    Fault("admits held requests", IgnoresHolds, "test_held_requests_wait_and_let_others_pass"),
    Fault("preempts held requests at once", PreemptsHeldRequests, "test_held_request_keeps_what_it_has"),
    Fault("drops drafts of held requests", DropsDraftsOfHeldRequests, "test_held_request_keeps_what_it_has"),
    Fault("admits nobody behind a held one", WaitsForHeldRequests, "test_held_requests_wait_and_let_others_pass"),
    Fault("looks at a few that wait", LooksAtFew, "test_held_requests_wait_and_let_others_pass[12]"),
    Fault(
        "leaves held requests blocks that others need",
        NeverPreemptsHeldRequests,
        "test_held_requests_stop_nobody_for_want_of_blocks",
    ),
    Fault(
        "preempts the only one that could run",
        NeverPreemptsHeldRequests,
        "test_requests_that_run_and_are_held_stop_nobody_for_want_of_blocks",
    ),
    Fault(
        "leaves held requests the places of others",
        NeverPreemptsHeldRequests,
        "test_held_requests_stop_nobody_for_want_of_a_place",
    ),
    Fault("keeps held requests that are aborted", KeepsHeldRequests, "test_abort_of_held_requests_in_every_status"),
    Fault("takes any value for a name", NeedsATenant, "test_reads_what_the_user_says_of_requests_without_writing_it"),
    Fault("writes the output's limit", LimitsOutput, "test_one_request_runs_to_its_end"),
    Fault("schedules a request twice", Twice, "test_one_request_runs_to_its_end"),
    Fault("refuses prompts below max_model_len", RefusesLongPrompts, "test_request_of_max_model_len_runs"),
    Fault("writes the counts of a new request", WritesCounts, "test_one_request_runs_to_its_end"),
    Fault("counts preemptions itself", CountsPreemptions, "test_finishes_in_memory_for_one"),
    Fault("shares a table with others", OneTable, "test_schedulers_of_one_process_do_not_meet"),
    Fault("shares a queue with others", OneQueue, "test_schedulers_of_one_process_do_not_meet"),
    Fault("seeds the random generator of the process", ShufflesByTheProcess, "test_leaves_random_generators_alone"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_scheduler_that(fault: Fault) -> None:
    check_fault(fault, SchedulerSuite, plugin=fault.plugin)


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


class PriorityFirst(FCFSScheduler):
    """Sees to priorities, and does not say so."""

    def rank(self, request: RequestState) -> Rank:
        return (request.priority,)


@pytest.mark.parametrize(
    ("policy", "is_hinted"), [(PriorityFirst, True), (FCFSScheduler, False), (LastInFirstOut, False)]
)
def test_priorities_are_hinted_at_where_they_count(policy: type[Scheduler], is_hinted: bool) -> None:
    cases = [f"test_better_priority_is_admitted_first[{first}]" for first in ("better", "worse")]
    hint = try_capability(SchedulerSuite, {"plugin": policy}, Capability("priorities"), cases)
    assert (hint is not None) is is_hinted


@pytest.mark.parametrize("policy", [FCFSScheduler, LastInFirstOut, HalfOfThemLast, ReturnsLast, SwappedReturnLast])
@pytest.mark.parametrize("test", sorted({fault.test.partition("[")[0] for fault in FAULTS}))
def test_the_suite_leaves_the_order_to_policies(policy: type[BatchingScheduler], test: str) -> None:
    outcome = run_test(SchedulerSuite, test, plugin=policy)
    assert outcome.passed or outcome.skipped
    assert not outcome.failed


class WithAnArgument(FCFSScheduler):
    """The host could not create it; a test may."""

    def __init__(self, options: BatchingOptions, limits: SchedulerLimits, queue_length: int):
        super().__init__(options, limits)
        self.queue_length = queue_length


def test_a_scheduler_may_be_created_by_a_method_instead() -> None:
    def create(suite: SchedulerSuite, limits: SchedulerLimits) -> Scheduler:
        return WithAnArgument(BatchingOptions(), limits, 100)

    given = {"plugin": WithAnArgument, "create_scheduler": create}
    assert run_test(SchedulerSuite, "test_one_request_runs_to_its_end", **given).passed


def test_a_subclass_without_a_scheduler_fails() -> None:
    outcome = run_test(SchedulerSuite, "test_one_request_runs_to_its_end")
    assert "plugin" in outcome.failed["test_one_request_runs_to_its_end"]


def test_the_options_of_a_subclass_are_validated() -> None:
    test = "test_one_request_runs_to_its_end"
    outcome = run_test(SchedulerSuite, test, plugin=FCFSScheduler, options={"watermrk": 0})
    assert "watermrk" in outcome.failed[test]
