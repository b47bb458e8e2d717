"""What the bundled schedulers promise beyond the contract: order, victims, and how a step's tokens are shared out."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dovetail.contracts.scheduler import RequestState, RequestStatus, SchedulerLimits
from dovetail.schedulers.batching import BatchingOptions, BatchingScheduler
from dovetail.schedulers.fcfs import FCFSScheduler
from dovetail.schedulers.priority import PriorityScheduler
from dovetail.testing.scheduler_simulation import SchedulerSimulation
from dovetail.testing.scheduler_traffic import random_simulation, run_random_traffic

LIMITS = SchedulerLimits(max_num_batched_tokens=16, max_num_seqs=8, max_model_len=64)
both = pytest.mark.parametrize("kind", [FCFSScheduler, PriorityScheduler])


def simulate(
    kind: type[BatchingScheduler] = FCFSScheduler,
    limits: SchedulerLimits = LIMITS,
    options: BatchingOptions | None = None,
    **memory,
) -> SchedulerSimulation:
    scheduler = kind(options or BatchingOptions(watermark=0), limits)
    return SchedulerSimulation(scheduler, limits, **{"num_blocks": 200, "prefix_caching": False, **memory})


@both
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), mode=st.sampled_from(["auto", "recompute"]), watermark=st.sampled_from([0, 0.2]))
def test_random_traffic(kind: type[BatchingScheduler], seed: int, mode, watermark: float):
    rng = Random(seed)
    options = BatchingOptions(preemption_mode=mode, watermark=watermark)
    run_random_traffic(random_simulation(lambda limits: kind(options, limits), rng), rng)


@both
def test_equal_requests_start_in_order_of_arrival(kind: type[BatchingScheduler]):
    simulation = simulate(kind, replace(LIMITS, max_num_seqs=1))
    sequences = [simulation.add([1, 2], 2) for _ in range(4)]
    simulation.run()
    assert simulation.finished == sequences


def test_prompts_get_what_decodes_leave():
    simulation = simulate()
    first = simulation.add([1] * 4, 10)
    simulation.step()
    second = simulation.add([1] * 30, 2)
    schedule = simulation.step()
    assert (schedule.requests, schedule.num_tokens) == ([first, second], [1, 15])


def test_waiting_prompt_is_not_started_beside_a_partial_one():
    simulation = simulate()
    first = simulation.add([1] * 20, 2)
    second = simulation.add([1] * 20, 2)
    assert simulation.step().requests == [first]
    schedule = simulation.step()
    assert (schedule.requests, schedule.num_tokens) == ([first, second], [4, 12])


def test_short_prompt_overtakes_a_long_one_that_waits_for_another_long_one():
    limits = replace(LIMITS, long_prefill_token_threshold=6, max_num_partial_prefills=2, max_long_partial_prefills=1)
    simulation = simulate(limits=limits)
    long, _, short = simulation.add([1] * 30, 2), simulation.add([1] * 30, 2), simulation.add([1] * 4, 2)
    schedule = simulation.step()
    assert (schedule.requests, schedule.num_tokens) == ([long, short], [6, 4])
    simulation.run()


def test_drafts_are_cut_so_that_every_request_decodes():
    simulation = simulate(limits=replace(LIMITS, max_num_batched_tokens=5))
    sequences = [simulation.add([1], 20) for _ in range(4)]
    simulation.step()
    for sequence in sequences:
        sequence.num_draft_tokens = 3
        simulation._drafts[sequence.seq_id] = [0, 0, 0]
    assert simulation.step().num_tokens == [2, 1, 1, 1]
    simulation.run()


def test_drafts_go_before_other_requests_do():
    simulation = simulate(num_blocks=7, block_size=2)
    first, second = simulation.add([1] * 4, 6), simulation.add([2] * 4, 2)
    simulation.step()
    first.num_draft_tokens = 4
    simulation._drafts[first.seq_id] = [0] * 4
    schedule = simulation.step()
    assert (schedule.requests, schedule.num_tokens) == ([first, second], [1, 1])
    assert not schedule.preempted


@pytest.mark.parametrize(("mode", "status"), [("auto", RequestStatus.SWAPPED), ("recompute", RequestStatus.PREEMPTED)])
def test_latest_gives_way_and_comes_back(mode, status: RequestStatus):
    simulation = simulate(options=BatchingOptions(preemption_mode=mode), num_blocks=7, num_host_blocks=6)
    first, second = simulation.add([1] * 4, 8), simulation.add([2] * 4, 8)
    while second.status is not status:
        simulation.step()
    assert first.status is RequestStatus.RUNNING
    simulation.run()
    assert simulation.finished == [first, second]


def test_swapped_request_is_not_computed_again():
    simulation = simulate(num_blocks=7, num_host_blocks=6)
    simulation.add([1] * 4, 8)
    second = simulation.add([2] * 4, 8)
    while second.status is not RequestStatus.SWAPPED:
        simulation.step()
    num_computed = second.num_computed_tokens
    while second.status is RequestStatus.SWAPPED:
        schedule = simulation.step()
    assert schedule.num_tokens == [1]
    assert second.num_computed_tokens == num_computed + 1


def test_without_room_on_the_host_requests_are_computed_again():
    simulation = simulate(num_blocks=7, num_host_blocks=1)
    simulation.add([1] * 4, 8)
    second = simulation.add([2] * 4, 8)
    while second.status is RequestStatus.WAITING or second.status is RequestStatus.RUNNING:
        simulation.step()
    assert second.status is RequestStatus.PREEMPTED
    simulation.run()


def test_watermark_holds_back_a_request_beside_others():
    simulation = simulate(options=BatchingOptions(watermark=0.5), num_blocks=21)
    first, second = simulation.add([1] * 16, 2), simulation.add([2] * 6, 2)
    assert simulation.step().requests == [first]
    simulation.run()
    assert simulation.finished == [first, second]


def test_rest_of_a_partial_prompt_is_spoken_for():
    simulation = simulate(num_blocks=21)
    simulation.add([1] * 10, 6)
    simulation.step()
    late = simulation.add([2] * 30, 2)
    simulation.step()
    assert late.status is RequestStatus.WAITING
    simulation.run()
    assert simulation.num_preemptions == 0


def test_urgent_request_starts_first():
    simulation = simulate(PriorityScheduler, replace(LIMITS, max_num_seqs=1))
    later, urgent = simulation.add([1], 2, priority=1), simulation.add([2], 2, priority=0)
    simulation.run()
    assert simulation.finished == [urgent, later]


def test_urgent_request_takes_a_seat():
    simulation = simulate(PriorityScheduler, replace(LIMITS, max_num_seqs=2))
    urgent, usual, idle = (simulation.add([1], 6, priority=priority) for priority in (0, 1, 2))
    simulation.step()
    assert idle.status is RequestStatus.WAITING
    newcomer = simulation.add([2], 2, priority=0)
    schedule = simulation.step()
    assert schedule.preempted == [usual]
    assert schedule.requests == [urgent, newcomer]
    simulation.run()


def test_tokens_of_a_displaced_request_are_given_to_others():
    simulation = simulate(PriorityScheduler, replace(LIMITS, max_num_seqs=2, max_num_batched_tokens=4))
    usual = [simulation.add([1], 6, priority=1) for _ in range(2)]
    simulation.step()
    urgent = [simulation.add(prompt, 2, priority=0) for prompt in ([1] * 3, [2])]
    schedule = simulation.step()
    assert schedule.preempted == usual[::-1]
    assert (schedule.requests, schedule.num_tokens) == (urgent, [2, 1])
    simulation.run()


def test_urgent_request_takes_blocks_from_the_lowest_priority_then_the_latest():
    simulation = simulate(PriorityScheduler, num_blocks=10, num_host_blocks=10)
    low = [simulation.add([token] * 3, 3, priority=5) for token in range(3)]
    middle = simulation.add([1] * 3, 3, priority=3)
    simulation.step()
    urgent = simulation.add([1] * 8, 2, priority=0)
    schedule = simulation.step()
    assert schedule.preempted == [low[2], low[1]]
    assert urgent in schedule.requests
    assert {low[0].status, middle.status} == {RequestStatus.RUNNING}
    simulation.run()


@pytest.mark.parametrize("max_num_seqs", [2, 8])
def test_nobody_is_preempted_for_a_request_that_cannot_start_all_the_same(max_num_seqs: int):
    simulation = simulate(PriorityScheduler, replace(LIMITS, max_num_seqs=max_num_seqs), num_blocks=12)
    first, low = simulation.add([1] * 12, 3, priority=0), simulation.add([2] * 4, 3, priority=5)
    simulation.step()
    middle = simulation.add([3] * 14, 2, priority=1)
    schedule = simulation.step()
    assert (schedule.requests, schedule.preempted) == ([first, low], [])
    simulation.run()
    assert simulation.finished == [first, low, middle]
    assert simulation.num_preemptions == 0


def test_nobody_is_preempted_for_the_watermark():
    simulation = simulate(PriorityScheduler, options=BatchingOptions(watermark=0.5), num_blocks=21)
    low = simulation.add([1] * 14, 4, priority=5)
    simulation.step()
    urgent = simulation.add([2] * 6, 2, priority=0)
    schedule = simulation.step()
    assert (schedule.requests, schedule.preempted) == ([low, urgent], [])
    simulation.run()


def test_the_watermark_holds_for_those_that_a_request_does_not_outrank():
    simulation = simulate(PriorityScheduler, options=BatchingOptions(watermark=0.5), num_blocks=21)
    equal = simulation.add([1] * 14, 4, priority=0)
    simulation.step()
    late = simulation.add([2] * 6, 2, priority=0)
    assert simulation.step().requests == [equal]
    assert late.status is RequestStatus.WAITING
    simulation.run()


def test_equal_priority_takes_nothing():
    simulation = simulate(PriorityScheduler, replace(LIMITS, max_num_seqs=1))
    first = simulation.add([1], 4)
    simulation.step()
    simulation.add([2], 2)
    assert simulation.step().requests == [first]
    simulation.run()


class Unstable(PriorityScheduler):
    """Its order is not strict."""

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        return waiting.priority <= running.priority


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_requests_of_one_rank_do_not_displace_each_other_in_turn(max_num_seqs: int):
    simulation = simulate(Unstable, replace(LIMITS, max_num_seqs=max_num_seqs))
    for token in range(4):
        simulation.add([token % 3, 1], 10)
    simulation.run()
    assert simulation.num_preemptions == 0


@both
def test_requests_that_arrive_together_compute_their_common_prefix_once(kind: type[BatchingScheduler]):
    simulation = simulate(kind, prefix_caching=True)
    first, second, third = (simulation.add([1] * 8 + [2, number], 2) for number in range(3))
    stranger = simulation.add([0] * 4, 2)
    schedule = simulation.step()
    assert (schedule.requests, schedule.num_tokens) == ([first, stranger], [10, 4])
    schedule = simulation.step()
    assert (schedule.requests, schedule.num_tokens) == ([first, stranger, second, third], [1, 1, 2, 2])
    simulation.run()


@both
def test_no_prefix_is_looked_for_while_every_place_is_taken(kind: type[BatchingScheduler], monkeypatch):
    simulation = simulate(kind, replace(LIMITS, max_num_seqs=1), prefix_caching=True)
    first, second = simulation.add([1] * 8, 6), simulation.add([1] * 8, 2)
    attach_prefix, attached = simulation.kv.attach_prefix, []
    monkeypatch.setattr(
        simulation.kv, "attach_prefix", lambda request: (attached.append(request), attach_prefix(request))
    )
    simulation.run()
    assert attached == [first, second]


def test_unknown_request_cannot_be_removed():
    with pytest.raises(KeyError):
        FCFSScheduler(BatchingOptions(), LIMITS).remove(RequestState("stranger", 3))


class EarliestDeadlineFirst(BatchingScheduler):
    def rank(self, request: RequestState) -> tuple[float, ...]:
        return (float(request.extra["deadline"]),)


def test_a_request_whose_rank_is_nan_is_refused_alone():
    scheduler = EarliestDeadlineFirst(BatchingOptions(), LIMITS)
    requests = [RequestState(str(index), 3, extra={"deadline": deadline}) for index, deadline in enumerate("537")]
    for request in requests:
        scheduler.add(request)
    with pytest.raises(ValueError, match=r"the rank of request late contains NaN: \(nan, 3\)"):
        scheduler.add(RequestState("late", 3, extra={"deadline": "nan"}))
    assert scheduler.num_waiting == 3
    for request in requests:
        scheduler.remove(request)
    assert scheduler.num_waiting == 0


def test_a_request_that_its_rank_does_not_find_is_told():
    ranks: dict[RequestState, list[int]] = {}

    class ByMutableRank(BatchingScheduler):
        def rank(self, request: RequestState) -> tuple[list[int]]:
            return (ranks[request],)

    scheduler = ByMutableRank(BatchingOptions(), LIMITS)
    requests = [RequestState(str(index), 3) for index in range(3)]
    for index, request in enumerate(requests):
        ranks[request] = [index]
        scheduler.add(request)
    ranks[requests[0]][0] = 9
    with pytest.raises(RuntimeError, match="request 0 is in no queue under its rank"):
        scheduler.remove(requests[0])


@pytest.mark.parametrize("bad", [{"watermark": 1}, {"preemption_mode": "swap"}, {"unknown": 1}])
def test_bad_options_are_refused(bad: dict[str, object]):
    with pytest.raises(ValidationError):
        BatchingOptions(**bad)
