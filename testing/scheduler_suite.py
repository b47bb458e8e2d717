"""Conformance suite for schedulers. A third party's test is a subclass::

    from dovetail.testing import SchedulerSuite

    class TestMyScheduler(SchedulerSuite):
        plugin = MyScheduler

The tests drive it with real KV memory and simulated pages (`dovetail.testing.scheduler_simulation`), and check in each
step every rule that the contract states. Grants are rounded down as a host may (`dovetail.testing.granting`), requests
are held and resumed, and steps overlap.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

import pytest

from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.scheduler import RequestStatus, Scheduler, SchedulerLimits
from dovetail.engine.sequence import Sequence
from dovetail.testing.granting import GrantRule, Multiples, Refusals, Spans
from dovetail.testing.scheduler_simulation import SchedulerSimulation
from dovetail.testing.scheduler_traffic import random_simulation, run_random_traffic
from dovetail.testing.side_effects import leaves_alone
from dovetail.testing.suite import PluginSuite

LIMITS = SchedulerLimits(max_num_batched_tokens=16, max_num_seqs=8, max_model_len=32)
_OTHERS_FINISH = "requests finish while others are held"


class SchedulerSuite(PluginSuite):
    """Tests of every scheduler. A plugin author sets `plugin`, and `options` where they differ."""

    kind: ClassVar[str] = "scheduler"
    plugin: ClassVar[type[Scheduler]]
    options: ClassVar[Mapping[str, Any]] = {}

    def create_scheduler(self, limits: SchedulerLimits) -> Scheduler:
        """Returns a new scheduler."""
        return self.plugin(self.plugin.Options.model_validate(dict(self.options)), limits)

    def test_empty_schedule_without_requests(self) -> None:
        simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS)
        assert simulation.step().requests == []

    def test_one_request_runs_to_its_end(self) -> None:
        simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS)
        sequence = simulation.add([1, 2, 0, 1], 5)
        simulation.run()
        assert simulation.finished == [sequence]
        assert simulation.num_steps == 5

    @pytest.mark.parametrize("num_output", [1, 20])
    def test_request_of_max_model_len_runs(self, num_output: int) -> None:
        simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS)
        sequence = simulation.add([1] * (LIMITS.max_model_len - num_output), num_output)
        simulation.run()
        assert simulation.finished == [sequence]

    def test_schedulers_of_one_process_do_not_meet(self) -> None:
        """Two of them, with requests of the same names, take as many steps as one by itself."""

        def start() -> SchedulerSimulation:
            simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS, num_blocks=20)
            for token in range(4):
                simulation.add([token % 3, 1, 2, 0], 12)
            return simulation

        alone = start()
        alone.run()
        pair = [start(), start()]
        for _ in range(alone.num_steps):
            for simulation in pair:
                if simulation.has_work:
                    simulation.step()
        assert not any(simulation.has_work for simulation in pair), "they take more steps than one by itself"
        for simulation in pair:
            simulation.check_idle()
        assert [simulation.num_steps for simulation in pair] == [alone.num_steps] * 2

    def test_leaves_random_generators_alone(self) -> None:
        """It does not draw from the process's random generators."""
        simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS)
        simulation.add([1, 2, 0, 1], 5)
        with leaves_alone():
            simulation.run()

    def test_requests_share_steps(self) -> None:
        simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS)
        for _ in range(4):
            simulation.add([1, 2, 0, 1], 4)
        simulation.run()
        assert simulation.num_steps < 16

    def test_long_prompt_is_chunked(self) -> None:
        limits = replace(LIMITS, max_num_batched_tokens=4)
        simulation = SchedulerSimulation(self.create_scheduler(limits), limits)
        simulation.add([1] * 11, 2)
        simulation.run()

    @pytest.mark.parametrize("most", [(1, 2), (2, 1), (2, 2)], ids=str)
    def test_prompts_in_part_are_as_few_as_the_limits_say(self, most: tuple[int, int]) -> None:
        """All of them long, in steps that have tokens for all."""
        limits = replace(
            LIMITS,
            max_num_batched_tokens=64,
            long_prefill_token_threshold=5,
            max_num_partial_prefills=most[0],
            max_long_partial_prefills=most[1],
        )
        simulation = SchedulerSimulation(self.create_scheduler(limits), limits, num_blocks=200, prefix_caching=False)
        for token in range(4):
            simulation.add([token % 3] * 12, 3)
        simulation.run()
        assert len(simulation.finished) == 4

    def test_prompt_waits_or_is_whole_without_chunking(self) -> None:
        limits = replace(LIMITS, enable_chunked_prefill=False)
        # A prefix to share would have the second prompt wait for the first, whatever the limits say.
        simulation = SchedulerSimulation(self.create_scheduler(limits), limits, num_blocks=200, prefix_caching=False)
        for length in (9, 9, 16, 3):
            simulation.add([1] * length, 3)
        simulation.run()

    def test_cached_prefix_is_not_computed_again(self) -> None:
        simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS)
        simulation.add([1, 2, 0, 1, 1, 2], 2)
        simulation.run()
        simulation.add([1, 2, 0, 1, 2, 2], 2)
        assert simulation.step().num_tokens == [2]
        simulation.run()

    def test_as_many_run_as_may(self) -> None:
        """Where tokens and memory suffice for all, `max_num_seqs` requests run at a time."""
        simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS, num_blocks=200)
        for token in range(2 * LIMITS.max_num_seqs):
            simulation.add([token % 3, 1], 20)
        for _ in range(LIMITS.max_num_seqs):
            simulation.step()
        assert simulation.scheduler.num_running == LIMITS.max_num_seqs
        simulation.run()

    def test_drafts_are_computed_where_they_fit(self) -> None:
        """All of them, of a request that has the step and the memory to itself."""
        simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS, num_blocks=200, max_drafts=3)
        sequence = simulation.add([1, 2, 0, 1], 20)
        num_drafts = 0
        for _ in range(20):  # each step gives a token at least
            num_drafts += sequence.num_draft_tokens
            wanted = sequence.num_wanted_tokens
            assert simulation.step().num_tokens == [wanted]
            if not simulation.has_work:
                break
        assert not simulation.has_work
        assert num_drafts > 0

    @pytest.mark.parametrize("num_host_blocks", [0, 30], ids=["recompute", "swap"])
    def test_finishes_in_memory_for_one(self, num_host_blocks: int) -> None:
        simulation = SchedulerSimulation(
            self.create_scheduler(LIMITS), LIMITS, num_blocks=11, num_host_blocks=num_host_blocks
        )
        longest = simulation.longest_request()
        for token in range(3):
            simulation.add([token, 1, 2, 0], longest - 4)
        simulation.run()
        assert len(simulation.finished) == 3

    @pytest.mark.parametrize("num_host_blocks", [0, 10], ids=["recompute", "swap"])
    def test_abort_in_every_status(self, num_host_blocks: int) -> None:
        """Of those that the scheduler puts requests into where memory is short."""
        simulation = SchedulerSimulation(
            self.create_scheduler(LIMITS), LIMITS, num_blocks=11, num_host_blocks=num_host_blocks
        )
        seen = _end_one_of_each_status(simulation, simulation.abort)
        assert not simulation.num_preemptions or seen & {RequestStatus.PREEMPTED, RequestStatus.SWAPPED}

    @pytest.mark.parametrize("rule", [Multiples(5), Spans(5, 7), Refusals(3)], ids=lambda rule: type(rule).__name__)
    @pytest.mark.parametrize("max_drafts", [0, 3])
    def test_uses_what_is_granted(self, rule: GrantRule, max_drafts: int) -> None:
        """Which is fewer tokens than it asks for, or none in some steps; where memory is ample that is no reason to
        preempt a request."""
        simulation = SchedulerSimulation(
            self.create_scheduler(LIMITS), LIMITS, num_blocks=200, max_drafts=max_drafts, grants=rule
        )
        for token in range(6):
            simulation.add([token % 3, 1, 2, 0] * 5, 8)
        simulation.run()
        assert len(simulation.finished) == 6
        assert simulation.num_preemptions == 0

    def test_gets_a_span_that_takes_the_whole_step(self) -> None:
        """A span is granted only if all of it is asked for, while others run that need the same."""
        limits = replace(LIMITS, max_num_partial_prefills=2)
        simulation = SchedulerSimulation(
            self.create_scheduler(limits), limits, num_blocks=200, prefix_caching=False, grants=Spans(16, 20)
        )
        for token in range(3):
            simulation.add([token] * 24, 4)
        simulation.run(max_steps=100)
        assert len(simulation.finished) == 3

    def test_schedules_while_a_step_is_in_flight(self) -> None:
        """The counts then include the step in flight."""
        simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS, num_blocks=11, max_in_flight=2)
        longest = simulation.longest_request()
        for token in range(3):
            simulation.add([token, 1, 2, 0], longest - 4)
        simulation.run()
        assert len(simulation.finished) == 3

    def test_held_request_keeps_what_it_has(self) -> None:
        """Status, blocks and drafts, while others run; then it goes on."""
        simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS, num_blocks=200, max_drafts=3)
        held, other = simulation.add([1, 2, 0, 1], 20), simulation.add([2, 2, 0, 1], 12)
        simulation.run_until(lambda: held.num_draft_tokens > 0, "the request has drafts")
        simulation.hold(held)
        before = (held.status, held.block_ids, held.num_computed_tokens, held.num_draft_tokens)
        while other in simulation.live:
            assert simulation.step().requests == [other]
        assert simulation.step().requests == []
        assert (held.status, held.block_ids, held.num_computed_tokens, held.num_draft_tokens) == before
        simulation.resume(held)
        wanted = held.num_wanted_tokens
        assert simulation.step().num_tokens == [wanted]
        simulation.run()
        assert simulation.num_preemptions == 0

    @pytest.mark.parametrize("num_held", [1, 12])
    def test_held_requests_wait_and_let_others_pass(self, num_held: int) -> None:
        """They are not admitted, however many there are."""
        simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS, num_blocks=400)
        held = [simulation.add([1, 2, 0, token % 3], 4) for token in range(num_held)]
        for sequence in held:
            simulation.hold(sequence)
        assert simulation.step().requests == []
        other = simulation.add([1] * 4, 4)
        while simulation.live != held:
            assert simulation.step().requests == [other]
        assert {sequence.status for sequence in held} == {RequestStatus.WAITING}
        for sequence in held:
            simulation.resume(sequence)
        simulation.run()

    @pytest.mark.parametrize("num_host_blocks", [0, 30], ids=["recompute", "swap"])
    @pytest.mark.parametrize("num_others", [1, 2])
    def test_held_requests_stop_nobody_for_want_of_blocks(self, num_host_blocks: int, num_others: int) -> None:
        simulation = SchedulerSimulation(
            self.create_scheduler(LIMITS), LIMITS, num_blocks=11, num_host_blocks=num_host_blocks
        )
        longest = simulation.longest_request()
        held = simulation.add([1, 2, 0, 1], longest - 4)
        simulation.run_until(lambda: simulation.kv.num_free_blocks <= 4, "the request holds blocks for its tokens")
        simulation.hold(held)
        for token in range(num_others):
            simulation.add([token, 2, 2, 0], longest - 4)
        simulation.run_until(lambda: simulation.live == [held], _OTHERS_FINISH)
        assert simulation.step().requests == []
        simulation.resume(held)
        simulation.run()

    def test_requests_that_run_and_are_held_stop_nobody_for_want_of_blocks(self) -> None:
        """Whichever of two that have the memory between them is held."""
        for index in range(2):
            simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS, num_blocks=11)
            pair = [simulation.add([token, 1, 2, 0], 14) for token in range(2)]
            _run_until_all_run(simulation, pair)
            _finish_without(simulation, [pair[index]])
            simulation.run()

    def test_held_requests_stop_nobody_for_want_of_a_place(self) -> None:
        limits = replace(LIMITS, max_num_seqs=2)
        simulation = SchedulerSimulation(self.create_scheduler(limits), limits, num_blocks=200)
        held = [simulation.add([token, 1, 2, 0], 8) for token in range(2)]
        _run_until_all_run(simulation, held)
        simulation.add([2, 1], 3)
        _finish_without(simulation, held)
        simulation.run()

    @pytest.mark.parametrize("num_host_blocks", [0, 10], ids=["recompute", "swap"])
    def test_abort_of_held_requests_in_every_status(self, num_host_blocks: int) -> None:
        """Of those that the scheduler puts requests into where memory is short."""
        simulation = SchedulerSimulation(
            self.create_scheduler(LIMITS), LIMITS, num_blocks=11, num_host_blocks=num_host_blocks
        )

        def end(sequence: Sequence) -> None:
            simulation.hold(sequence)
            simulation.step()
            simulation.abort(sequence)

        _end_one_of_each_status(simulation, end)

    def test_reads_what_the_user_says_of_requests_without_writing_it(self) -> None:
        """Values of any kind: those that it does not know, it leaves alone."""
        simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS)
        for extra in ({}, {"tenant": "a"}, {"tenant": 3, "unheard of": [object()]}):
            sampling = SamplingParams(extra=extra)
            simulation.add([1, 2, 0, 1], 5, sampling=sampling)
            assert sampling.extra == extra
        simulation.run()
        assert len(simulation.finished) == 3

    @pytest.mark.parametrize("first", ["better", "worse"])
    def test_better_priority_is_admitted_first(self, first: str) -> None:
        """Whichever arrived first, of two requests that are alike but for their priorities and wait for one place."""
        self.require("priorities")
        limits = replace(LIMITS, max_num_seqs=1)
        simulation = SchedulerSimulation(self.create_scheduler(limits), limits, num_blocks=200, prefix_caching=False)
        simulation.add([1, 2, 0, 1], 4)
        simulation.step()
        order = (0, 100) if first == "better" else (100, 0)
        waiting = {priority: simulation.add([2, 1, 2, 0], 4, priority=priority) for priority in order}
        simulation.run_until(
            lambda: any(sequence.status is RequestStatus.RUNNING for sequence in waiting.values()),
            "a request is admitted once the place is free",
        )
        assert waiting[0].status is RequestStatus.RUNNING, "priority 100 is admitted before priority 0"
        simulation.run()

    def test_forgets_requests_that_are_removed(self) -> None:
        """Those that finished, and those that were aborted while they ran or waited. What it keeps of its latest step
        may last until the next ones."""
        simulation = SchedulerSimulation(self.create_scheduler(LIMITS), LIMITS, num_blocks=11)
        removed = []
        for round_id in range(2):
            sequences = [simulation.add([token, 1, 2, 0], 12) for token in range(4)]
            removed += [weakref.ref(sequence) for sequence in sequences]
            for _ in range(3):
                simulation.step()
            simulation.abort(sequences[-round_id])
            del sequences
            simulation.run()
        simulation.finished.clear()
        simulation.add([1, 2, 0, 1], 5)
        simulation.run()
        num_kept = _num_alive(removed)
        assert not num_kept, f"{num_kept} of {len(removed)} requests are kept after they were removed"

    @pytest.mark.parametrize("seed", range(25))
    def test_random_traffic(self, seed: int) -> None:
        rng = Random(seed)
        run_random_traffic(random_simulation(self.create_scheduler, rng), rng)


def _num_alive(references: list[weakref.ref[Any]]) -> int:
    """How many objects are kept. Garbage of the whole process is collected where cycles may keep some."""
    if any(reference() is not None for reference in references):
        gc.collect()
    return sum(reference() is not None for reference in references)


def _run_until_all_run(simulation: SchedulerSimulation, sequences: list[Sequence]) -> None:
    simulation.run_until(
        lambda: all(sequence.status is RequestStatus.RUNNING for sequence in sequences),
        f"{len(sequences)} requests that have memory and places are admitted",
    )


def _finish_without(simulation: SchedulerSimulation, held: list[Sequence]) -> None:
    """Holds requests until all others are finished."""
    for sequence in held:
        simulation.hold(sequence)
    simulation.run_until(lambda: simulation.live == held, _OTHERS_FINISH)
    for sequence in held:
        simulation.resume(sequence)


def _end_one_of_each_status(simulation: SchedulerSimulation, end: Callable[[Sequence], None]) -> set[RequestStatus]:
    """Ends one request in each of the statuses that the scheduler puts three requests into, runs the rest, and returns
    these statuses: running ones at least."""
    seen: set[RequestStatus] = set()
    for _ in range(40):
        while len(simulation.live) < 3:
            simulation.add([len(seen) % 3, 1, 2, 0], 12)
        simulation.step()
        fresh = [sequence for sequence in simulation.live if sequence.status not in seen]
        if fresh:
            seen.add(fresh[0].status)
            end(fresh[0])
    simulation.run()
    assert RequestStatus.RUNNING in seen
    return seen
