"""Cohorts: which requests take part in which of several steps in flight, so that no pipeline stage waits for another.

A token of a request is known when the last stage has sampled it. Meanwhile the other stages work on other requests:
those that run are divided into cohorts, whose steps follow each other. Schedulers know nothing of this. For the call of
`Scheduler.schedule` in which one cohort has its turn, requests of the others are held, and so are those whose next
token is in flight. New requests join the cohort whose turn it is, up to its share: the KV memory refuses more.

A prompt whose last token is not in flight is not held, whatever its cohort: its next tokens are known. So a long
prompt is computed by several steps in flight, one behind the other.

Why blocks can change hands while a step in flight writes to them. Every rank runs all plans in the order in which they
were handed over, with the moves of pages that they ask for. So on each rank the write of the older step comes first,
and nobody reads what it left: the new holder of a block computes a token before it reads the token's slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from dovetail.contracts.scheduler import KVMemory, RequestStatus, Schedule, Scheduler, SchedulerLimits
from dovetail.engine.kv.manager import KVCacheManager
from dovetail.engine.sequence import Sequence
from dovetail.engine.stage_tokens import StageTokens
from dovetail.engine.step import Step

ALL: int = -1
"""In the place of a cohort: every request that is not in flight, or prompts alone."""


class AdmittingMemory(KVMemory):
    """The KV memory in a cohort's turn: it refuses new requests beyond the cohort's share, as the contract allows."""

    def __init__(self, kv: KVCacheManager, members: dict[Sequence, int], most: int, margin: int | None):
        """`most`: requests that may be admitted. `margin`: where no request of the cohort runs, blocks that stay free
        behind a new request, so that nobody is preempted for it; None: the scheduler decides."""
        self.block_size = kv.block_size
        self._kv = kv
        self._members = members
        self._most = most
        self._margin = margin
        self._admitted: set[Sequence] = set()
        self._is_short = False

    @property
    def num_blocks(self) -> int:
        """See `KVMemory`."""
        return self._kv.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """See `KVMemory`."""
        return self._kv.num_free_blocks

    def awaits_prefix(self, request: Sequence) -> bool:
        """See `KVMemory`."""
        return self._is_closed(request) or self._kv.awaits_prefix(request)

    def attach_prefix(self, request: Sequence) -> int:
        """See `KVMemory`."""
        return self._kv.attach_prefix(request)

    def grant(self, request: Sequence, num_tokens: int, reserve: int = 0) -> int:
        """See `KVMemory`."""
        if self._refuses(request):
            return 0
        granted = self._kv.grant(request, num_tokens, reserve)
        if granted and request not in self._members:
            self._admitted.add(request)
        return granted

    def num_missing_blocks(self, request: Sequence, num_tokens: int, reserve: int = 0, without: Items[Any] = ()) -> int:
        """See `KVMemory`."""
        if self._refuses(request):
            return 0
        return self._kv.num_missing_blocks(request, num_tokens, reserve, without)

    def release(self, request: Sequence) -> None:
        """See `KVMemory`."""
        self._admitted.discard(request)
        self._kv.release(request)

    def swap_out(self, request: Sequence) -> bool:
        """See `KVMemory`."""
        return self._kv.swap_out(request)

    def swap_in(self, request: Sequence) -> bool:
        """See `KVMemory`."""
        return not self._refuses(request) and self._kv.swap_in(request)

    def _is_closed(self, request: Sequence) -> bool:
        if request in self._members or request in self._admitted:
            return False
        return self._is_short or len(self._admitted) >= self._most

    def _refuses(self, request: Sequence) -> bool:
        """Whether nothing is granted to a request that does not run yet."""
        if request in self._members or request in self._admitted:
            return False
        if not self._is_closed(request) and self._margin is not None:
            rest = request.num_tokens - request.num_computed_tokens
            # Those behind it are refused as well: small requests must not overtake a large one for ever.
            self._is_short = self._kv.num_missing_blocks(request, rest, self._margin) > 0
        return self._is_closed(request)


@dataclass(frozen=True, slots=True)
class Turn:
    """Which requests the next schedule is about."""

    cohort: int
    memory: KVMemory
    """As the scheduler sees it."""
    admits_only: bool
    """Whether none of the cohort's requests can run: only new ones can."""


@dataclass(slots=True)
class _Cohort:
    """One cohort before a schedule."""

    members: list[Sequence]
    ready: list[Sequence]
    """Those that can run."""
    is_in_flight: bool = False


class Cohorts:
    """Who belongs to which cohort, and whose turn it is."""

    def __init__(self, num_cohorts: int, scheduler: Scheduler, limits: SchedulerLimits, kv: KVCacheManager):
        self._num = num_cohorts
        self._scheduler = scheduler
        self._limits = limits
        self._kv = kv
        self._members: dict[Sequence, int] = {}
        """The cohort of each request that runs."""
        self._last = num_cohorts - 1
        """Whose turn it was last."""
        self._held: list[Sequence] = []
        self._admits_none = False
        """Whether the scheduler admitted none when it could do nothing else."""
        self._turn: Turn | None = None
        self.tokens = StageTokens()

    def begin(self, flights: Iterable[Step]) -> Turn | None:
        """Holds who must not be in the next step, until `end`. `flights` are lifted. None: none may be scheduled before
        a step in flight is committed, and nobody is held."""
        busy, following = _in_flight(flights)
        cohorts = self._look(flights, busy, following)
        if not following and not self._admits():
            self._rebalance(cohorts)
        self._turn = self._choose(cohorts, following)
        if self._turn is not None:
            self._hold(self._turn.cohort, busy, following)
        return self._turn

    def begin_all(self) -> None:
        """The next schedule is about all, and nobody is held; no step is in flight."""
        self._turn = None

    def end(self, schedule: Schedule | None) -> None:
        """The schedule is made; None: it was not."""
        for sequence in self._held:
            sequence.end_turn()
        self._held.clear()
        if self._turn is not None and self._turn.admits_only and schedule is not None:
            self._admits_none = not schedule.requests

    def join(self, step: Step) -> None:
        """The step is planned: those who are in it for the first time join its cohort, and its plan gets the tokens
        that some stages lack."""
        step.plan = self.tokens.complete(step.plan, step.schedule.requests)
        turn, members = self._turn, self._members
        step.cohort = ALL if turn is None else turn.cohort
        if step.cohort != ALL:
            self._last = step.cohort
        new = [sequence for sequence in step.schedule.requests if sequence not in members]
        sizes = Counter(members.values()) if new and step.cohort == ALL else Counter()
        for sequence in new:
            cohort = min(range(self._num), key=sizes.__getitem__) if step.cohort == ALL else step.cohort
            members[sequence] = cohort
            sizes[cohort] += 1
            self._admits_none = False

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._members.pop(sequence, None)
        self.tokens.forget(sequence.seq_id)

    def _look(self, flights: Iterable[Step], busy: set[Sequence], following: set[Sequence]) -> list[_Cohort]:
        cohorts = [_Cohort([], []) for _ in range(self._num)]
        for flight in flights:
            if flight.cohort != ALL:
                cohorts[flight.cohort].is_in_flight = True
        left = [sequence for sequence in self._members if sequence.status is not RequestStatus.RUNNING]
        for sequence in left:
            del self._members[sequence]
        for sequence, cohort in self._members.items():
            cohorts[cohort].members.append(sequence)
            if sequence not in busy and sequence not in following and not sequence.is_held:
                cohorts[cohort].ready.append(sequence)
        return cohorts

    def _admits(self) -> bool:
        """Whether a request that waits may be admitted."""
        scheduler = self._scheduler
        return scheduler.num_waiting > 0 and scheduler.num_running < self._limits.max_num_seqs and not self._admits_none

    def _rebalance(self, cohorts: list[_Cohort]) -> None:
        """Half of the largest cohort go to one that is less than half as large."""
        smallest = min(cohorts, key=lambda cohort: len(cohort.members))
        largest = max(cohorts, key=lambda cohort: len(cohort.members))
        difference = len(largest.members) - len(smallest.members)
        if difference < 2 or 2 * len(smallest.members) >= len(largest.members):
            return
        # Those who are not in flight first: they need not wait for their new cohort's turn.
        ready = set(largest.ready)
        movable = [*largest.ready, *(sequence for sequence in largest.members if sequence not in ready)]
        for sequence in movable[: difference // 2]:
            self._members[sequence] = cohorts.index(smallest)
            largest.members.remove(sequence)
            smallest.members.append(sequence)
            if sequence in ready:
                largest.ready.remove(sequence)
                smallest.ready.append(sequence)

    def _choose(self, cohorts: list[_Cohort], following: set[Sequence]) -> Turn | None:
        """The cohort that waited longest, of those that have no step in flight."""
        order = [(self._last + 1 + i) % self._num for i in range(self._num)]
        free = [index for index in order if not cohorts[index].is_in_flight]
        runs = [sequence for sequence in following if not sequence.is_held]
        for index in free:
            if cohorts[index].ready:
                return self._turn_of(index, cohorts, runs)
        if free and self._admits():
            index = min(free, key=lambda index: len(cohorts[index].members))
            return self._turn_of(index, cohorts, runs)
        if runs and self._fits(runs):
            return Turn(ALL, AdmittingMemory(self._kv, self._members, 0, None), admits_only=False)
        return None

    def _turn_of(self, index: int, cohorts: list[_Cohort], runs: list[Sequence]) -> Turn | None:
        running = [*cohorts[index].ready, *runs]
        if running and not self._fits(running):
            # Somebody must be preempted: of all, not of this cohort, so that the best of all is sure to go on.
            return None
        most = self._share(len(cohorts[index].members))
        # Where the step has none but new requests, a scheduler might preempt held ones for them.
        margin = None if running else self._scheduler.num_running * len(self._kv.layout.groups)
        memory = AdmittingMemory(self._kv, self._members, most, margin)
        return Turn(index, memory, admits_only=not running)

    def _share(self, size: int) -> int:
        """How many may join a cohort of `size`."""
        scheduler, most = self._scheduler, self._limits.max_num_seqs
        if scheduler.num_running >= most:
            return most  # whoever is admitted displaces another
        total = min(scheduler.num_running + scheduler.num_waiting, most)
        return max(0, -(-total // self._num) - size)

    def _fits(self, running: list[Sequence]) -> bool:
        """Whether there are blocks for all that these can compute in one step."""
        kv, most = self._kv, self._limits.max_num_batched_tokens
        num_groups = len(kv.layout.groups)
        free = kv.num_free_blocks
        ahead = max(sequence.num_lookahead_tokens for sequence in running)
        if free >= (len(running) * (1 - (-ahead // kv.block_size)) - (-most // kv.block_size)) * num_groups:
            return True
        # Beyond all that are free, as many are missing as each of them needs.
        counts = (min(sequence.num_wanted_tokens, most) for sequence in running)
        needs = (kv.num_missing_blocks(each, count, free) for each, count in zip(running, counts, strict=True))
        return sum(needs) <= free

    def _hold(self, turn: int, busy: set[Sequence], following: set[Sequence]) -> None:
        held = self._held
        held += busy
        for sequence, cohort in self._members.items():
            if cohort != turn and sequence not in busy and sequence not in following:
                held.append(sequence)
        for sequence in held:
            sequence.await_turn()


def _in_flight(flights: Iterable[Step]) -> tuple[set[Sequence], set[Sequence]]:
    """Requests in flight: those that must wait until their step is committed, since they get a token or were
    preempted meanwhile, and those of which more tokens are known."""
    busy: set[Sequence] = set()
    following: set[Sequence] = set()
    for flight in flights:
        for sequence, gains in zip(flight.schedule.requests, flight.gains, strict=True):
            if sequence.status is RequestStatus.RUNNING and not gains:
                following.add(sequence)
            elif sequence.status is not RequestStatus.FINISHED:
                busy.add(sequence)
    return busy, following - busy
