"""The step loop: schedule, execute, commit. It knows sequences, blocks and plans; text and prompts are others'
business."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress

from dovetail.contracts.errors import PluginError, WorkerError
from dovetail.contracts.executor import Executor
from dovetail.contracts.scheduler import RequestStatus, Schedule, Scheduler, SchedulerLimits
from dovetail.contracts.step import NewRequest, StepPlan, StepResult
from dovetail.engine.adapters.slots import AdapterSlots
from dovetail.engine.cohorts import Cohorts
from dovetail.engine.commit import commit_tokens
from dovetail.engine.kv.manager import KVCacheManager
from dovetail.engine.schedule_check import ask_scheduler, check_entering, check_progress, scheduler_raised
from dovetail.engine.sequence import Sequence
from dovetail.engine.siblings import Siblings
from dovetail.engine.step import Ending, Step, drop_ended, may_follow


class EngineCore:
    """Sequences in, tokens out. A step ends before the one after it is planned, unless several may be in flight: then
    the next ones are planned and handed over first, so that the device never waits for the host."""

    def __init__(
        self,
        scheduler: Scheduler,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        executor: Executor,
        max_in_flight: int = 1,
        slots: AdapterSlots | None = None,
        num_stages: int = 1,
    ):
        """`slots`: of adapters; None where none are served. `num_stages`: of the pipeline; with several, up to one step
        more is in flight, whatever `max_in_flight` says."""
        self._slots = kv.adapters = slots
        if slots is not None:
            slots.watch(lambda: self._live.values())
        self._flights: deque[Step] = deque()
        """Steps that were handed over and not committed."""
        self._open: Step | None = None
        """The step that was planned and not handed over. Where there is one, none is in flight."""
        self._open_has_lost = False
        """Whether some sequence ended since it was planned."""
        self._max_in_flight = max_in_flight if num_stages == 1 else num_stages + 1
        self._cohorts = Cohorts(num_stages, scheduler, limits, kv) if num_stages > 1 else None
        """Who takes part in which of the steps in flight; None: a step is about whoever wants tokens."""
        self._awaits_flights = False
        """Whether the scheduler had nothing for a step behind those in flight. It may have preempted requests that are
        in them, which no plan has said: it is asked again once they are committed."""
        self._landed = 0.0
        """When the last step was committed; time.monotonic()."""
        self._scheduler = scheduler
        self._limits = limits
        self._kv = kv
        self._executor = executor
        self._step_id = 0
        self._live: dict[int, Sequence] = {}
        """Sequences that have not ended, by seq_id."""
        self._on_worker: set[int] = set()
        self._reached_worker: set[int] = set()
        """seq_ids that the workers ever held: whatever these keep of a sequence, they must hear of its end."""
        self._gone: list[int] = []
        """seq_ids that the workers may forget with the next plan."""
        self._unheard: list[int] = []
        """Keys that were preempted by a plan of which nobody knows whether the workers heard it."""
        self._unheard_blocks: list[tuple[int, int, int, list[int]]] = []
        """Entries of block tables, as in `StepPlan.new_blocks`, that were in such a plan."""
        self._awaiting_first: set[int] = set()
        self._siblings = Siblings(kv)
        self._may_have_drafts = False
        """Whether some step left drafts behind."""
        self._bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.idle_drafters: frozenset[str] = frozenset()
        """As the last step told."""
        self.failure: WorkerError | None = None

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a place, those that wait for a sibling's prompt included."""
        return self._scheduler.num_waiting + self._siblings.num_parked

    @property
    def has_work(self) -> bool:
        """Whether some sequence has not ended, or a step is planned or in flight."""
        return bool(self._live or self._flights) or self._open is not None

    @property
    def is_runnable(self) -> bool:
        """Whether a step would do something: some sequence is not held, or a step is planned or in flight."""
        if self._flights or self._open is not None:
            return True
        # A copy: those who wait for the engine ask while another thread is in it.
        return any(not sequence.is_held for sequence in list(self._live.values()))

    @property
    def next_step(self) -> Step | None:
        """The step that `execute` would commit; None where none is planned or in flight."""
        return self._flights[0] if self._flights else self._open

    def is_in_flight(self, step: Step) -> bool:
        """Whether the workers have it, and its tokens are not committed."""
        return any(flight is step for flight in self._flights)

    def add(self, sequence: Sequence, bad_word_ids: tuple[tuple[int, ...], ...] = ()) -> None:
        """Takes in a sequence. Raises `PluginError` where the scheduler raises; nothing of it is kept then."""
        self._enqueue(sequence)
        if bad_word_ids:
            self._bad_words[sequence.seq_id] = bad_word_ids

    def add_siblings(
        self, first: Sequence, siblings: list[Sequence], bad_word_ids: tuple[tuple[int, ...], ...]
    ) -> None:
        """Takes in sequences with the same prompt: one computes it, the others share its blocks afterwards. Raises as
        `add` does."""
        self.add(first, bad_word_ids)
        if siblings:
            self._siblings.park(first, siblings)
            if bad_word_ids:
                self._bad_words.update((sibling.seq_id, bad_word_ids) for sibling in siblings)

    def _enqueue(self, sequence: Sequence) -> None:
        try:
            self._scheduler.add(sequence)
        except BaseException as error:
            with suppress(Exception):  # it may know the sequence or not
                self._scheduler.remove(sequence)
            if not isinstance(error, Exception):
                raise
            raise scheduler_raised(self._scheduler, error) from error
        self._live[sequence.seq_id] = sequence
        self._awaiting_first.add(sequence.seq_id)

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence, in whatever state it is. Its blocks are freed, unless `retain_blocks` asks to keep them.

        Raises `PluginError` where the scheduler raises; the sequence has ended then too.
        """
        if sequence.status is RequestStatus.FINISHED:
            return
        if self._open is not None:
            self._open_has_lost = True
        is_parked = self._siblings.drop_parked(sequence)
        errors: list[BaseException] = []
        refused: list[tuple[Sequence, PluginError]] = []
        try:
            # First of all: a scheduler must not keep a sequence that has ended, whatever its siblings meet.
            if not is_parked and sequence.seq_id in self._live:
                self._remove(sequence)
        except BaseException as error:
            errors.append(error)
        try:
            refused = self._unpark(sequence)
        except BaseException as error:
            errors.append(error)
        self._forget(sequence)
        for sibling, refusal in refused:
            errors.append(refusal)
            self.finish(sibling)
        _raise_first(errors)

    def finish_all(self, sequences: Iterable[Sequence]) -> None:
        """Ends each of `sequences`, and then raises the first error of `finish`, with the others as notes."""
        errors: list[BaseException] = []
        for sequence in sequences:
            try:
                self.finish(sequence)
            except BaseException as error:
                errors.append(error)
        _raise_first(errors)

    def _remove(self, sequence: Sequence) -> None:
        try:
            self._scheduler.remove(sequence)
        except Exception as error:
            raise scheduler_raised(self._scheduler, error) from error

    def _forget(self, sequence: Sequence) -> None:
        if sequence.fork_parent is not None:
            self._siblings.leave_parent(sequence)
        sequence.status = RequestStatus.FINISHED
        self._awaiting_first.discard(sequence.seq_id)
        self._bad_words.pop(sequence.seq_id, None)
        if self._slots is not None:
            self._slots.forget(sequence)
        if self._cohorts is not None:
            self._cohorts.forget(sequence)
        self._live.pop(sequence.seq_id, None)
        self._on_worker.discard(sequence.seq_id)
        if sequence.seq_id in self._reached_worker:
            self._reached_worker.remove(sequence.seq_id)
            self._gone.append(sequence.seq_id)
        if sequence.retain_blocks:
            self._siblings.retain(sequence)
        else:
            self._kv.free(sequence)

    def release_retained(self, sequences: Iterable[Sequence]) -> None:
        """Frees the blocks of retained sequences."""
        self._siblings.release(sequences)

    def step(self) -> Step | None:
        """Commits one step: `schedule` and `execute`. None where there was nothing to do."""
        return self.execute() if self.schedule() is not None else None

    def schedule(self) -> Step | None:
        """The step that `execute` commits: the oldest in flight, or else one that is planned now and not handed over.
        None where there is nothing to do: no sequences, or all of them are held. Asked again, it is the same step,
        although sequences may have ended meanwhile.

        Raises `WorkerError` when a worker died: the core is unusable then; `PluginError` for a scheduler that raises
        or that breaks its contract.
        """
        if self.failure is not None:
            raise self.failure
        if self._flights:
            return self._flights[0]
        if self._open is None:
            self._open = self._plan_next()
        return self._open

    def execute(self) -> Step:
        """Commits the step that `schedule` returned, and hands over as many behind it as may be in flight. Raises as
        `schedule` does. An exception of the workers but `WorkerError` fails the sequences that took part, and the core
        goes on."""
        self._hand_over_open()
        while self._may_launch():
            self._awaits_flights = not self._launch()
        step = self._land()
        # A step that is committed may have been all that a cohort waited for.
        self._awaits_flights = self._awaits_flights and bool(self._flights) and self._cohorts is None
        return step

    def _may_launch(self) -> bool:
        """Whether to schedule a step behind those in flight."""
        if self._awaits_flights or len(self._flights) >= self._max_in_flight:
            return False
        if self._cohorts is not None:
            return True
        if not may_follow(self._flights):
            return False
        # Behind several, nobody must be preempted for blocks that the steps in flight will free.
        return len(self._flights) == 1 or self._kv.num_free_blocks >= self._most_new_blocks()

    def _most_new_blocks(self) -> int:
        """More blocks than the next step takes for the requests that run."""
        num_tokens, kv = self._limits.max_num_batched_tokens, self._kv
        return (self._scheduler.num_running - (-num_tokens // kv.block_size)) * len(kv.layout.groups)

    def settle(self) -> None:
        """Commits the steps that are under way although every sequence of theirs ended."""
        self._hand_over_open()
        while self._flights:
            self._land()

    def land_all(self) -> Iterator[Step]:
        """Commits the steps in flight, and one that was only planned, and yields them. Raises as `step` does."""
        self._hand_over_open()
        while self._flights:
            yield self._land()

    def preempt_all(self) -> None:
        """Every sequence gives up its blocks, on the device and on the host, and waits to be computed again, in the
        order in which they came. To be called while all are held and no step is in flight. Raises `PluginError` where
        the scheduler raises: what is in the queue then, nobody knows."""
        self._siblings.release_all()
        sequences = list(self._live.values())
        for sequence in sequences:
            self._remove(sequence)
        for sequence in sequences:
            if sequence.block_ids or sequence.host_block_ids:
                self._kv.release(sequence)
            sequence.status = RequestStatus.WAITING
            try:
                self._scheduler.add(sequence)
            except Exception as error:
                raise scheduler_raised(self._scheduler, error) from error

    def _launch(self) -> bool:
        """Plans a step and hands it over; False where there is nothing to do."""
        step = self._plan_next()
        if step is None:
            return False
        self._hand_over(step)
        return True

    def _plan_next(self) -> Step | None:
        """The next step, of which the workers do not know yet; None where there is nothing to do."""
        started = time.monotonic()
        for flight in self._flights:
            flight.lift()
        try:
            schedule = self._schedule() if self._cohorts is None else self._schedule_cohort(self._cohorts)
            if not schedule.requests:
                if not self._flights and not (self._slots is not None and self._slots.has_refused):
                    check_progress(self._scheduler, self._live)
                return None
            step = self._plan(schedule, started)
            if self._cohorts is not None:
                self._cohorts.join(step)
            return step
        finally:
            for flight in self._flights:
                flight.lower()

    def _hand_over_open(self) -> None:
        step, self._open = self._open, None
        if step is not None:
            self._hand_over(step)

    def _hand_over(self, step: Step) -> None:
        try:
            step.future = self._executor.execute(step.plan)
        except Exception as error:
            step.future = Future()
            step.future.set_exception(error)
        except BaseException as error:
            # Ctrl-C: nobody knows how far the workers came with this step.
            self._fail_step(step, error)
            raise
        self._flights.append(step)

    def _land(self) -> Step:
        """Waits for the oldest step and commits its tokens."""
        step = self._flights.popleft()
        if step.entered:
            step.entered = [sequence for sequence in step.entered if sequence.seq_id in self._live]
        # Before the step before it was committed, this one did not have the device.
        step.started = max(step.started, self._landed)
        try:
            step.result = step.future.result()
        except WorkerError as error:
            self.failure = error
            self._flights.clear()
            raise
        except Exception as error:
            self._fail_step(step, error)
        except BaseException as error:
            for each in (step, *self._flights):
                self._fail_step(each, error)
            self._flights.clear()
            raise
        else:
            if self._max_in_flight > 1 or self._open_has_lost:
                drop_ended(step)
                self._open_has_lost = False
            self._commit(step)
        self._landed = step.ended = time.monotonic()
        return step

    def _schedule(self) -> Schedule:
        schedule = ask_scheduler(self._scheduler, self._limits, self._kv, self._live)
        if not schedule.requests and self._siblings.retains_blocks and self.is_runnable:
            # Retained blocks are a convenience; nobody may starve for them.
            gave_way = schedule.preempted
            self._siblings.release_all()
            if self._flights:
                # The scheduler may have preempted requests that are in them, and would admit these again: it is asked
                # when they are committed.
                return schedule
            schedule = ask_scheduler(self._scheduler, self._limits, self._kv, self._live)
            schedule.preempted = [*gave_way, *schedule.preempted]
        return schedule

    def _schedule_cohort(self, cohorts: Cohorts) -> Schedule:
        """What the scheduler decides about the cohort that has its turn. Where nobody can run so, and no step is in
        flight, it decides about all: it says who is preempted, and whoever is best goes on."""
        turn = cohorts.begin(self._flights)
        schedule = None
        if turn is not None:
            try:
                schedule = ask_scheduler(self._scheduler, self._limits, self._kv, self._live, turn.memory)
            finally:
                cohorts.end(schedule)
        if self._flights or (schedule is not None and schedule.requests):
            return schedule or Schedule()
        cohorts.begin_all()
        gave_way = schedule.preempted if schedule is not None else []
        schedule = self._schedule()
        schedule.preempted = [*gave_way, *schedule.preempted]
        return schedule

    def _plan(self, schedule: Schedule, started: float) -> Step:
        """The step that a schedule asks for: what the workers do not know yet goes into its plan."""
        self._step_id += 1
        requests, known = schedule.requests, self._on_worker
        seq_ids = [sequence.seq_id for sequence in requests]
        num_drafts = _scheduled_drafts(schedule) if self._may_have_drafts else None
        has_news = self._kv.has_changes or self._gone or self._unheard or self._unheard_blocks
        is_placing = self._slots is not None and self._slots.has_changes
        if not has_news and not is_placing and known.issuperset(seq_ids):
            # Nobody comes or leaves, and no block changes hands: most steps of most decodes.
            return Step(schedule, StepPlan(self._step_id, seq_ids, schedule.num_tokens, num_drafts), [], started)
        changes = self._kv.drain()
        preempted, self._unheard = self._unheard, []
        for seq_id in changes.given_up:
            if seq_id in self._live:
                self._live[seq_id].num_preemptions += 1
            if seq_id in known:
                known.remove(seq_id)
                preempted.append(seq_id)
        new_blocks = [change for change in (*self._unheard_blocks, *changes.new_blocks) if change[0] in known]
        self._unheard_blocks = []
        entered = [sequence for sequence in requests if sequence.seq_id not in known]
        if entered:
            check_entering(self._scheduler, self._limits, entered, len(known))
        for sequence in entered:
            self._enter(sequence)
        finished, self._gone = self._gone, []
        plan = StepPlan(
            step_id=self._step_id,
            seq_ids=seq_ids,
            num_tokens=schedule.num_tokens,
            num_drafts=num_drafts,
            new_requests=[self._new_request(sequence) for sequence in entered],
            new_blocks=new_blocks,
            finished=finished,
            preempted=preempted,
            swap_out=changes.swap_out,
            swap_in=changes.swap_in,
            copies=changes.copies,
            adapters=self._slots.drain() if self._slots is not None else (),
        )
        return Step(schedule, plan, entered, started)

    def _enter(self, sequence: Sequence) -> None:
        """The plan brings the sequence to the workers."""
        if any(sequence in flight.schedule.requests for flight in self._flights):
            raise PluginError(
                f"{type(self._scheduler).__name__} breaks the scheduler's contract: in one schedule it preempts"
                f" request {sequence.request_id} and admits it again; choose another scheduler.name"
            )
        self._on_worker.add(sequence.seq_id)
        self._reached_worker.add(sequence.seq_id)
        if sequence.fork_parent is not None:
            self._siblings.leave_parent(sequence)

    def _new_request(self, sequence: Sequence) -> NewRequest:
        return NewRequest(
            seq_id=sequence.seq_id,
            request_id=sequence.request_id,
            token_ids=sequence.token_ids[:],
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_computed_tokens=sequence.num_computed_tokens,
            block_ids=tuple(blocks[:] for blocks in sequence.block_ids),
            sampling=sequence.sampling,
            seed=sequence.seed,
            eos_token_ids=sequence.eos_token_ids,
            drafter=sequence.drafter,
            bad_word_ids=self._bad_words.get(sequence.seq_id, ()),
            grammar=sequence.grammar,
            prediction=sequence.prediction,
            pooling=sequence.pooling,
            token_types=sequence.token_types,
            adapter=sequence.adapter.digest if sequence.adapter is not None else None,
        )

    def _commit(self, step: Step) -> None:
        result, requests = step.result, step.schedule.requests
        self.idle_drafters = result.idle_drafters
        for index in result.drafter_errors:
            # Before blocks are shared, which lack the drafter's pages; or it would be back after a preemption.
            self._leave_drafter(requests[index])
        if self._awaiting_first:
            self._count_prompt_tokens(step)
        commit_tokens(step, self._kv)
        for index, num_drafts in result.num_next_drafts.items():
            self._may_have_drafts = True
            # Whoever gave way meanwhile has left the workers, and its drafts are gone.
            requests[index].num_draft_tokens = num_drafts if requests[index].block_ids else 0
        if self._cohorts is not None and result.next_drafts:
            self._cohorts.tokens.note(requests, result)
        if self._awaiting_first:
            self._note_first_tokens(step)
        for sequence, ending in step.endings:
            if ending.error is not None:
                self._distrust(sequence)
            self.finish(sequence)

    def _leave_drafter(self, sequence: Sequence) -> None:
        """A drafter that failed a sequence may have left anything in its own pages of that sequence's blocks."""
        if sequence.hash_seed != sequence.plain_hash_seed:
            self._kv.forget_content(sequence)
        sequence.leave_drafter()

    def _distrust(self, sequence: Sequence) -> None:
        """Nobody finds or shares the pages of a sequence that failed: NaN in a part of a prompt shows only when the
        first token is drawn, and would fail every later request with that prefix."""
        self._kv.forget_content(sequence)
        sequence.retain_blocks = False

    def _count_prompt_tokens(self, step: Step) -> None:
        step.num_prompt_tokens = sum(
            num_tokens
            for sequence, num_tokens in zip(step.schedule.requests, step.schedule.num_tokens, strict=True)
            if sequence.seq_id in self._awaiting_first
        )

    def _note_first_tokens(self, step: Step) -> None:
        for sequence in step.schedule.requests:
            if sequence.seq_id in self._awaiting_first and sequence.num_tokens > sequence.num_prompt_tokens:
                self._awaiting_first.remove(sequence.seq_id)
                step.first_tokens.append(sequence)
                for sibling, error in self._unpark(sequence):
                    step.endings.append((sibling, Ending("error", error=str(error))))
                    self.finish(sibling)

    def _unpark(self, sequence: Sequence) -> list[tuple[Sequence, PluginError]]:
        """The siblings of a sequence enter the queue: its prompt is computed, or it is gone. Returns those that the
        scheduler refuses, which are not in it."""
        refused = []
        for sibling in self._siblings.take_parked(sequence):
            try:
                self._enqueue(sibling)
            except PluginError as error:
                refused.append((sibling, error))
        return refused

    def _fail_step(self, step: Step, error: BaseException) -> None:
        """Ends every sequence that took part in a step that raised, and those whose pages the plan was to move, since
        nobody knows whether it did. Siblings that waited to share such pages compute their own.

        The workers are told once more what to forget, and which blocks others took. Whoever took blocks, or whose
        adapter came to its slot, and is in a step behind this one ends as well: what was computed, nobody knows.
        """
        plan = step.plan
        step.result = StepResult(plan.step_id, [])
        message = f"{type(error).__name__}: {error}"
        failed = {sequence.seq_id: sequence for sequence in step.schedule.requests} | self._holders_of_moved_pages(plan)
        took_blocks = {change[0] for change in plan.new_blocks}
        placed = {placement.digest for placement in plan.adapters}
        for flight in self._flights:
            failed |= {
                sequence.seq_id: sequence
                for sequence in flight.schedule.requests
                if sequence.seq_id in took_blocks
                or (sequence.adapter is not None and sequence.adapter.digest in placed)
            }
        for sequence in failed.values():
            step.endings.append((sequence, Ending("error", error=message)))
            self._distrust(sequence)
            with suppress(PluginError):  # of the two errors, the step's is the cause
                self.finish(sequence)
        if self._slots is not None:
            self._slots.withdraw(plan.adapters)
        self._gone += plan.finished
        self._unheard += [seq_id for seq_id in plan.preempted if seq_id in self._live]
        self._unheard_blocks += [change for change in plan.new_blocks if change[0] in self._live]

    def _holders_of_moved_pages(self, plan: StepPlan) -> dict[int, Sequence]:
        """Sequences that hold a block, on the device or on the host, into which the plan moves a page; by seq_id."""
        device = {target for _, target in [*plan.swap_in, *plan.copies]}
        host = {target for _, target in plan.swap_out}
        if not device and not host:
            return {}
        return {
            seq_id: sequence
            for seq_id, sequence in self._live.items()
            if any(not device.isdisjoint(table) for table in sequence.block_ids)
            or any(not host.isdisjoint(table) for table in sequence.host_block_ids)
        }


def _raise_first(errors: list[BaseException]) -> None:
    """Raises the first of `errors`, if any, with the others as notes. Ctrl-C goes first."""
    if errors:
        first = min(errors, key=lambda error: isinstance(error, Exception))
        for words in dict.fromkeys(str(error) for error in errors):
            if words != str(first):
                first.add_note(f"also: {words}")
        raise first


def _scheduled_drafts(schedule: Schedule) -> list[int] | None:
    """How many of each request's scheduled tokens are drafts; None if no request has any."""
    drafts = None
    for index, sequence in enumerate(schedule.requests):
        if sequence.num_draft_tokens:
            if drafts is None:
                drafts = [0] * len(schedule.requests)
            reached = sequence.num_computed_tokens + schedule.num_tokens[index]
            drafts[index] = max(0, reached - sequence.num_tokens)
    return drafts
