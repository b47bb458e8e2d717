"""Steps over pipeline stages: cohorts of requests that take turns, and what the stages before the last learn later.

With S stages, up to S + 1 steps are in flight, and none may need a token that another one samples. So the requests that
run are dealt into S cohorts of about equal size, and a step is one cohort's. While a request's next token is in flight,
schedulers see the request as held; a prompt's next chunk may follow the one before it, since its tokens are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from dovetail.contracts.scheduler import RequestStatus
from dovetail.contracts.step import DraftTokens, StepPlan, StepResult
from dovetail.engine.sequence import Sequence
from dovetail.engine.step import Step


class Cohorts:
    """The running sequences of one engine, dealt into as many cohorts as there are stages. Those that wait belong to
    none: they join the cohort in whose turn they are admitted."""

    def __init__(self, num_stages: int):
        self.max_in_flight = num_stages + 1
        """Steps: one on each stage, and one that waits for the first."""
        self._num = num_stages
        self._of: dict[int, int] = {}
        """By seq_id, the cohort of a sequence that runs."""
        self._next = 0
        """The cohort whose turn it is."""

    @contextmanager
    def turns(self, live: Mapping[int, Sequence], flights: deque[Step], num_free: int) -> Iterator[Iterator[bool]]:
        """Gives the turns in which the next step may be scheduled, the one of the cohort that waited longest first.
        During a turn, sequences that take no part in it are held; afterwards all are as they were. A turn is True where
        nothing is in flight and all sequences take part: a scheduler must then schedule something.

        `flights` must be lifted. `num_free`: blocks that nobody holds; with none, those that wait get no turn of their
        own, in which a scheduler would preempt who is in flight for them.
        """
        awaited = _awaited(flights)
        free = [sequence for sequence in live.values() if not sequence.is_held]
        cohorts = self._deal([sequence for sequence in free if sequence.status is RequestStatus.RUNNING], awaited)
        waiting = [s for s in free if s.status is not RequestStatus.RUNNING and s.seq_id not in awaited]
        try:
            yield self._turns(free, cohorts, waiting, awaited, may_admit=num_free > 0, is_idle=not flights)
        finally:
            for sequence in free:
                sequence.is_held = False

    def _turns(
        self,
        free: list[Sequence],
        cohorts: list[list[Sequence]],
        waiting: list[Sequence],
        awaited: set[int],
        *,
        may_admit: bool,
        is_idle: bool,
    ) -> Iterator[bool]:
        for _ in range(self._num):
            members, self._next = cohorts[self._next], (self._next + 1) % self._num
            ready = [sequence for sequence in members if sequence.seq_id not in awaited]
            if not ready and (members or not waiting or not may_admit):
                continue
            part = {sequence.seq_id for sequence in (*ready, *waiting)}
            for sequence in free:
                sequence.is_held = sequence.seq_id not in part
            yield False
        if is_idle:  # no cohort has anything that fits: the scheduler decides about all
            for sequence in free:
                sequence.is_held = False
            yield True

    def _deal(self, running: list[Sequence], awaited: set[int]) -> list[list[Sequence]]:
        """The cohorts of those that run. Newcomers stay in the cohort whose turn it was; then those that nobody waits
        for move from the largest cohort to the smallest, while that helps."""
        last_turn = (self._next - 1) % self._num
        before, self._of = self._of, {}
        cohorts: list[list[Sequence]] = [[] for _ in range(self._num)]
        for sequence in running:
            cohorts[before.get(sequence.seq_id, last_turn)].append(sequence)
        while True:
            smallest, largest = min(cohorts, key=len), max(cohorts, key=len)
            movable = next((s for s in reversed(largest) if s.seq_id not in awaited), None)
            if len(largest) - len(smallest) < 2 or movable is None:
                break
            largest.remove(movable)
            smallest.append(movable)
        self._of = {sequence.seq_id: index for index, members in enumerate(cohorts) for sequence in members}
        return cohorts


def _awaited(flights: deque[Step]) -> set[int]:
    """seq_ids of those in flight that cannot be in another step yet: their next token is not known, or they were
    preempted and would enter anew behind a step of theirs."""
    return {
        sequence.seq_id
        for flight in flights
        for sequence, gains in zip(flight.schedule.requests, flight.gains, strict=True)
        if gains or sequence.status is not RequestStatus.RUNNING
    }


class StageNews:
    """What the workers of the last stage know of the requests' tokens, and those of the other stages do not yet."""

    def __init__(self) -> None:
        self._sampled: dict[int, list[int]] = {}
        """By seq_id: tokens since the request was last in a plan."""
        self._drafts: dict[int, DraftTokens] = {}
        """By seq_id: drafts that wait on the last stage."""

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """The result of a plan came in."""
        counts = result.counts if result.counts is not None else [1] * len(plan.seq_ids)
        tokens = iter(result.token_ids)
        for index, (seq_id, count) in enumerate(zip(plan.seq_ids, counts, strict=True)):
            if count:
                self._sampled.setdefault(seq_id, []).extend(next(tokens) for _ in range(count))
            if index in result.next_drafts:
                self._drafts[seq_id] = result.next_drafts[index]

    def forget(self, seq_id: int) -> None:
        """A request leaves the workers, or enters them with all its tokens."""
        self._sampled.pop(seq_id, None)
        self._drafts.pop(seq_id, None)

    def add_to(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with `sampled` and `draft_tokens` of its requests."""
        drafts = zip(plan.seq_ids, plan.num_drafts, strict=True) if plan.num_drafts is not None else ()
        return replace(
            plan,
            sampled=[(seq_id, self._sampled.pop(seq_id)) for seq_id in plan.seq_ids if seq_id in self._sampled],
            draft_tokens=[(seq_id, _first(self._drafts[seq_id], count)) for seq_id, count in drafts if count],
        )


def _first(drafts: DraftTokens, count: int) -> DraftTokens:
    """The first `count` nodes."""
    parents = None if drafts.parents is None else drafts.parents[:count]
    return DraftTokens(drafts.token_ids[:count], parents)
