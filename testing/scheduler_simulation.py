"""Runs a scheduler in an engine without a model: real KV memory, simulated pages, and every rule checked each step.

The next token of a sequence is a fixed function of its tokens and its seed, so its tokens are known in advance, and a
token that is lost, repeated or computed from wrong pages is noticed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import TypeVar

from dovetail.contracts.kv import KVLayout, KVSpec
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.scheduler import RequestStatus, Schedule, Scheduler, SchedulerLimits
from dovetail.engine.kv.manager import KVCacheManager
from dovetail.engine.kv.transfers import BlockChanges
from dovetail.engine.sequence import Sequence
from dovetail.testing.granting import GrantingMemory, GrantRule, in_full
from dovetail.testing.simulated_worker import Row, SimulatedWorker, states_of
from dovetail.worker.kv_layout import blocks_per_request, build_layout

VOCAB_SIZE = 3
_SAMPLING = SamplingParams()
_GIVEN = (
    "request_id",
    "num_prompt_tokens",
    "max_tokens",
    "num_tokens",
    "num_preemptions",
    "priority",
    "arrival_time",
    "extra",
    "is_held",
)

_MOST_STEPS = 25_000
"""Of one simulation, so that no loop of a test is without end."""
_PATIENCE = 1000
"""Steps after which what a test waits for will not come."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _Flight:
    """One step between its schedule and its tokens."""

    schedule: Schedule
    starts: list[int]
    """Per request, its computed tokens before the step."""
    gains: list[bool]
    """Per request, whether the step computes its last known token, and so gives it another."""
    changes: BlockChanges
    entering: list[tuple[int, list[list[int]]]]
    """(seq_id, block tables) of sequences that the worker does not know yet."""


class _Request(Sequence):
    """A sequence whose end can be seen (`weakref`)."""

    __slots__ = ("__weakref__",)


class SchedulerSimulation:
    """Drives one scheduler. Add requests, hold and abort them, step; every method raises `AssertionError` for a broken
    rule."""

    def __init__(
        self,
        scheduler: Scheduler,
        limits: SchedulerLimits,
        *,
        windows: tuple[int | None, ...] = (None,),
        block_size: int = 2,
        num_blocks: int = 32,
        num_host_blocks: int = 0,
        prefix_caching: bool = True,
        max_drafts: int = 0,
        max_in_flight: int = 1,
        grants: GrantRule = in_full,
        rng: Random | None = None,
    ):
        """One layer, and so one KV group, per entry of `windows`; `num_blocks` counts the null block. At most two steps
        may be in flight, one with drafts."""
        assert max_in_flight == 1 or (max_in_flight == 2 and not max_drafts)
        self.scheduler = scheduler
        self.limits = limits
        self.layout: KVLayout = build_layout(
            [KVSpec(num_kv_heads=1, head_size=1, dtype="float32", window=window) for window in windows], block_size
        )
        self.kv = KVCacheManager(
            self.layout, num_blocks, num_host_blocks=num_host_blocks, prefix_caching=prefix_caching
        )
        self.memory = GrantingMemory(self.kv, grants)
        self.worker = SimulatedWorker(self.layout, num_blocks, num_host_blocks)
        self.live: list[Sequence] = []
        """Sequences that the scheduler has."""
        self.finished: list[Sequence] = []
        self.num_preemptions = 0
        self.num_steps = 0
        self._max_drafts = max_drafts
        self._rng = rng or Random(0)
        self._seq_ids = count()
        self._drafts: dict[int, list[int]] = {}
        self._parked: dict[int, list[Sequence]] = {}
        self._max_in_flight = max_in_flight
        self._flights: deque[_Flight] = deque()
        self._on_worker: set[int] = set()

    @property
    def has_work(self) -> bool:
        """Whether some sequence is not finished."""
        return bool(self.live)

    def longest_request(self) -> int:
        """Tokens, prompt and output, that one request may have."""
        fits = 0
        while fits < self.limits.max_model_len and self._fits(fits + 1):
            fits += 1
        return fits

    def add(
        self,
        prompt: list[int],
        num_output_tokens: int,
        *,
        priority: int = 0,
        num_forks: int = 0,
        salt: bytes = b"",
        sampling: SamplingParams = _SAMPLING,
    ) -> Sequence:
        """Adds a request of `num_forks + 1` sequences; the forks enter once the first has an output token."""
        total = len(prompt) + num_output_tokens
        assert self._fits(total), f"a request of {total} tokens does not fit; see longest_request"
        sequences: list[Sequence] = [
            _Request(
                seq_id := next(self._seq_ids),
                f"request-{seq_id}",
                prompt,
                sampling,
                priority=priority,
                arrival_time=float(seq_id),
                hash_seed=salt,
                max_total_tokens=total,
                seed=seed,
            )
            for seed in range(num_forks + 1)
        ]
        first, *forks = sequences
        for fork in forks:
            fork.fork_parent = first
        self._parked[first.seq_id] = [*forks]
        self._enter(first)
        return first

    def abort(self, sequence: Sequence) -> None:
        """Ends a sequence at whatever point it is."""
        self._end(sequence)
        self._check_blocks()

    def hold(self, sequence: Sequence) -> None:
        """The sequence wants no tokens until it is resumed."""
        sequence.is_held = True

    def resume(self, sequence: Sequence) -> None:
        """Resumes a held sequence."""
        sequence.is_held = False

    def step(self) -> Schedule:
        """Schedules a step and checks the schedule. Computes the oldest step and commits its tokens where as many are
        in flight as may be, or where nothing was scheduled."""
        self.num_steps += 1
        assert self.num_steps <= _MOST_STEPS, f"{len(self.live)} requests are not finished after {_MOST_STEPS} steps"
        schedule = self._launch()
        if self._flights and (len(self._flights) >= self._max_in_flight or not schedule.requests):
            self._land(self._flights.popleft())
        return schedule

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until all sequences are finished, then checks that no block is held."""
        for _ in range(max_steps):
            if not self.live:
                break
            self.step()
        while self._flights:
            self._land(self._flights.popleft())
        assert not self.live, f"{len(self.live)} sequences are not finished after {max_steps} steps"
        self.check_idle()

    def run_until(self, holds: Callable[[], bool], what: str) -> None:
        """Steps until something holds, which `what` says as a clause."""
        for _ in range(_PATIENCE):
            if holds():
                return
            self.step()
        raise AssertionError(f"in vain after {_PATIENCE} steps: {what}")

    def check_idle(self) -> None:
        """Asserts that no memory is held once nothing runs."""
        self.kv.drain()
        statistics = self.kv.statistics()
        assert (statistics.num_used_blocks, statistics.num_used_host_blocks) == (0, 0)
        assert self.kv.num_free_blocks == self.kv.num_blocks - 1
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)

    def _fits(self, num_tokens: int) -> bool:
        needed = blocks_per_request(self.layout, num_tokens, self.limits.max_num_batched_tokens)
        return num_tokens <= self.limits.max_model_len and needed < self.kv.num_blocks

    def _enter(self, sequence: Sequence) -> None:
        self.live.append(sequence)
        self._ask(lambda: self.scheduler.add(sequence))

    def _end(self, sequence: Sequence) -> None:
        self._ask(lambda: self.scheduler.remove(sequence))
        self.live.remove(sequence)
        sequence.status = RequestStatus.FINISHED
        self.kv.free(sequence)
        self.worker.forget(sequence.seq_id)
        self._on_worker.discard(sequence.seq_id)
        self._drafts.pop(sequence.seq_id, None)
        for fork in self._parked.pop(sequence.seq_id, ()):
            self._enter(fork)

    def _ask(self, call: Callable[[], Answer], *, may_change_memory: bool = False) -> Answer:
        """What the scheduler answers. It may write `status`; the other fields are the engine's, whose memory writes
        some of them while it is scheduled."""
        before = []
        for sequence in self.live:
            names = [*_GIVEN] if may_change_memory else [*_GIVEN, "num_computed_tokens", "num_draft_tokens"]
            if not may_change_memory or sequence.block_ids:
                names.append("num_cached_tokens")
            before.append((sequence, {name: getattr(sequence, name) for name in names}))
        answer = call()
        for sequence, values in before:
            for name, value in values.items():
                assert getattr(sequence, name) == value, f"the scheduler writes {name}, which is the engine's"
        return answer

    def _launch(self) -> Schedule:
        """One call of `schedule`, with the counts that the steps in flight will have led to."""
        for flight in self._flights:
            self._count(flight, 1)
        before = [(sequence, sequence.status) for sequence in self.live if sequence.is_held]
        self.memory.begin_schedule()
        schedule = self._ask(lambda: self.scheduler.schedule(self.memory), may_change_memory=True)
        self._check_schedule(schedule)
        for sequence, status in before:
            assert sequence.status is status or sequence in schedule.preempted, (
                f"{sequence.request_id} is held and goes from {status} to {sequence.status}"
            )
        self.kv.end_schedule(sequence.seq_id for sequence in schedule.requests)
        for sequence in schedule.preempted:
            sequence.num_preemptions += 1
            self.num_preemptions += 1
            self._drafts.pop(sequence.seq_id, None)
        changes = self.kv.drain()
        unlisted = set(changes.given_up) - {sequence.seq_id for sequence in schedule.preempted}
        assert not unlisted, f"sequences {sorted(unlisted)} gave their blocks up and are not in Schedule.preempted"
        self._check_blocks()
        self._on_worker.difference_update(changes.given_up)
        entering = [
            (sequence.seq_id, [table[:] for table in sequence.block_ids])
            for sequence in schedule.requests
            if sequence.seq_id not in self._on_worker
        ]
        self._on_worker.update(seq_id for seq_id, _ in entering)
        starts = [sequence.num_computed_tokens for sequence in schedule.requests]
        gains = [
            sequence.num_computed_tokens + num_tokens >= sequence.num_tokens
            for sequence, num_tokens in zip(schedule.requests, schedule.num_tokens, strict=True)
        ]
        for flight in self._flights:
            self._count(flight, -1)
        self._flights.append(_Flight(schedule, starts, gains, changes, entering))
        return schedule

    def _count(self, flight: _Flight, sign: int) -> None:
        """Adds what a step in flight computes to the counts, or takes it away again."""
        for sequence, num_tokens, gains in zip(
            flight.schedule.requests, flight.schedule.num_tokens, flight.gains, strict=True
        ):
            if sequence.status is not RequestStatus.FINISHED:
                sequence.num_computed_tokens += sign * num_tokens
                sequence.num_tokens += sign * gains

    def _land(self, flight: _Flight) -> None:
        """Computes a step and commits its tokens; those of sequences that ended meanwhile are thrown away."""
        for seq_id in flight.changes.given_up:
            self.worker.forget(seq_id)
        self.worker.apply(flight.changes)
        live = {sequence.seq_id for sequence in self.live}
        for seq_id, tables in flight.entering:
            if seq_id in live:
                self.worker.install(seq_id, tables)
        schedule = flight.schedule
        steps = zip(schedule.requests, schedule.num_tokens, flight.starts, flight.gains, strict=True)
        rows = [(sequence, n, start, gains) for sequence, n, start, gains in steps if sequence.seq_id in live]
        self.worker.forward([self._row(sequence, start, n) for sequence, n, start, _ in rows])
        for sequence, num_tokens, start, gains in rows:
            self._commit(sequence, num_tokens, start, gains)

    def _row(self, sequence: Sequence, start: int, num_tokens: int) -> Row:
        tokens = [*sequence.token_ids, *self._drafts.get(sequence.seq_id, ())][: start + num_tokens]
        return Row(sequence.seq_id, start, states_of(tokens, sequence.hash_seed))

    def _commit(self, sequence: Sequence, num_tokens: int, start: int, gains: bool) -> None:
        drafts = self._drafts.pop(sequence.seq_id, [])[: max(0, start + num_tokens - sequence.num_tokens)]
        sequence.num_draft_tokens = 0
        sequence.num_computed_tokens += num_tokens
        if not gains:
            self.kv.commit(sequence)
            return
        num_rejected = len(drafts)
        for draft in [*drafts, None]:
            token = next_token(sequence.token_ids, sequence.seed)
            sequence.token_ids.append(token)
            sequence.num_tokens += 1
            if token != draft:
                break
            num_rejected -= 1
            if sequence.num_tokens == sequence.max_total_tokens:
                num_rejected += 1  # the last token is never computed
                break
        sequence.num_computed_tokens -= num_rejected
        if sequence.num_computed_tokens >= sequence.commit_at:
            self.kv.commit(sequence)
        if drafts:
            self.kv.trim(sequence)
        for fork in self._parked.pop(sequence.seq_id, ()):
            self._enter(fork)
        if sequence.num_tokens == sequence.max_total_tokens:
            self._finish(sequence)
        else:
            self._propose(sequence)

    def _finish(self, sequence: Sequence) -> None:
        expected = sequence.token_ids[: sequence.num_prompt_tokens]
        while len(expected) < sequence.max_total_tokens:
            expected.append(next_token(expected, sequence.seed))
        assert sequence.token_ids == expected
        self._end(sequence)
        self.finished.append(sequence)

    def _propose(self, sequence: Sequence) -> None:
        """Guesses some tokens, right ones first."""
        most = min(self._max_drafts, sequence.max_total_tokens - sequence.num_tokens - 1)
        num_drafts = self._rng.randint(0, max(0, most))
        tokens = sequence.token_ids[:]
        num_right = self._rng.randint(0, num_drafts)
        for index in range(num_drafts):
            right = next_token(tokens, sequence.seed)
            tokens.append(right if index < num_right else (right + 1) % VOCAB_SIZE)
        self._drafts[sequence.seq_id] = tokens[sequence.num_tokens :]
        sequence.num_draft_tokens = num_drafts

    def _check_schedule(self, schedule: Schedule) -> None:
        limits, requests, counts = self.limits, schedule.requests, schedule.num_tokens
        wanting = [sequence for sequence in self.live if not sequence.is_held]
        assert requests or not wanting or self._flights or self.memory.has_refused, (
            f"schedules nothing, although {len(wanting)} requests want tokens and no step is in flight"
        )
        assert len(requests) == len(counts) == len({sequence.seq_id for sequence in requests})
        assert sum(counts) <= limits.max_num_batched_tokens
        running = [sequence for sequence in self.live if sequence.status is RequestStatus.RUNNING]
        assert len(running) == self.scheduler.num_running <= limits.max_num_seqs
        assert len(self.live) - len(running) == self.scheduler.num_waiting
        partial = long = 0
        for sequence, num_tokens in zip(requests, counts, strict=True):
            assert sequence.status is RequestStatus.RUNNING, f"{sequence.request_id} is {sequence.status}"
            assert not sequence.is_held, f"{sequence.request_id} is scheduled although it is held"
            assert 1 <= num_tokens <= sequence.num_wanted_tokens
            granted = self.kv.grants.get(sequence.seq_id, 0)
            assert num_tokens == granted, f"{sequence.request_id} uses {num_tokens} tokens and was granted {granted}"
            num_known = sequence.num_tokens - sequence.num_computed_tokens
            is_partial = self.memory.asked[sequence.seq_id] < num_known
            partial += is_partial
            if limits.enable_chunked_prefill:
                if 0 < limits.long_prefill_token_threshold < num_known:
                    assert num_tokens <= limits.long_prefill_token_threshold
                    long += is_partial
            else:
                assert not is_partial or sequence.num_tokens > limits.max_num_batched_tokens
        assert partial <= limits.max_num_partial_prefills
        assert long <= limits.max_long_partial_prefills
        for sequence in schedule.preempted:
            assert sequence.status in (RequestStatus.PREEMPTED, RequestStatus.SWAPPED)
            assert (sequence.status is RequestStatus.SWAPPED) == bool(sequence.host_block_ids)
            assert not sequence.block_ids

    def _check_blocks(self) -> None:
        """Each block has as many references as block tables name it, and no host block is in use twice."""
        tables = [table for sequence in self.live for table in sequence.block_ids]
        holders = Counter(block for table in tables for block in table if block)
        refs = {block: num for block, num in enumerate(self.kv.pool.refs) if num}
        assert refs == holders
        hosts = Counter(b for s in self.live for table in s.host_block_ids for b in table if b >= 0)
        assert all(num == 1 for num in hosts.values())


def next_token(token_ids: list[int], seed: int) -> int:
    """What follows these tokens in a sequence with this seed."""
    return (states_of(token_ids)[-1] + seed * (len(token_ids) + 1)) % 1_009 % VOCAB_SIZE
