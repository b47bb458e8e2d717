"""The turns of a run in their order, each in the journal before the next one starts.

All batch sizes run a repetition before the next one begins, so that a run that is stopped has measured all of them as
often, but for the last repetition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from dovetail.commands.machine import NOISE_LIMIT, Span
from dovetail.contracts.errors import ConfigError, DovetailError
from dovetail.spec_decode.experiments.arms import Variant
from dovetail.spec_decode.experiments.datasets import conversation_of
from dovetail.spec_decode.experiments.journal import FinishedTurn, Journal, TurnKey
from dovetail.spec_decode.experiments.plan import Turn, make_groups, make_turns
from dovetail.spec_decode.experiments.records import RequestRecord, StepRecord
from dovetail.spec_decode.experiments.run import Bench, Workload, run_turn, warm_up
from dovetail.spec_decode.experiments.schema import BASELINE, CONTROL, Experiment

Decide = Callable[[Sequence[RequestRecord]], bool]
"""Whether what a batch size has brought decides it."""
OnTurn = Callable[[str], None]
"""Called with what runs next, before each turn."""


@dataclass(frozen=True)
class Extent:
    """How much of a run was measured."""

    planned: Mapping[int, int]
    """Turns by batch size: each arm with each group, in each repetition."""
    measured: Mapping[int, int]
    """Likewise; those of arms that failed count."""
    sessions: int
    """Processes that measured, one after the other."""
    rounds: int
    """Rounds that were measured."""
    disturbed: int
    """Rounds in which other processes took more than `NOISE_LIMIT` of the machine in some turn."""
    run_again: int
    """Rounds that ran again for that reason. Of both times the less disturbed counts."""
    decided: Sequence[int] | None
    """Batch sizes that ended since they were decided; None where the run did not look."""
    run: str
    """What tells this run from all others, however often it went on."""


@dataclass(frozen=True)
class Measured:
    """Everything that the turns brought, warm-up left out."""

    requests: Sequence[RequestRecord]
    steps: Sequence[StepRecord]
    spans: Sequence[Span]
    failures: Mapping[Variant, str]
    """Variants of which a request was refused or failed; what they brought before is left out."""
    extent: Extent


@dataclass(frozen=True)
class Round:
    """Every variant's turn with one group of prompts, in the order in which they run."""

    batch: int
    turns: Sequence[Turn[Variant]]
    attempt: int = 0

    @property
    def repetition(self) -> int:
        """Of all its turns."""
        return self.turns[0].repetition

    @property
    def label(self) -> str:
        """For people who wait."""
        return f"batch {self.batch}, repetition {self.repetition + 1}"

    def key(self, turn: Turn[Variant]) -> TurnKey:
        """Of one of its turns, in a journal."""
        variant = turn.what
        return (self.batch, turn.repetition, turn.group, self.attempt, variant.arm, variant.length)


class TimeLimit:
    """Minutes from now."""

    def __init__(self, minutes: float | None):
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    def is_passed(self) -> bool:
        """Whether they are over."""
        return self._end is not None and time.monotonic() >= self._end


def failure_of(variant: Variant, error: DovetailError, experiment: Experiment) -> str:
    """Why the experiment goes on without a variant of which a request failed. Raises `ConfigError` where it may not."""
    if variant.arm in (BASELINE, CONTROL) or not experiment.keep_going:
        raise ConfigError(f"arm {variant.label!r}: {error} (keep_going: true leaves such arms out)") from error
    return str(error)


class Course:
    """The rounds of an experiment: what is planned, and what has finished."""

    def __init__(self, bench: Bench, workload: Workload, journal: Journal, decide: Decide | None = None):
        self._bench = bench
        self._workload = workload
        self._journal = journal
        self._decide = decide
        experiment = bench.experiment
        self._planned = {batch: self._plan(batch) for batch in experiment.grid.batch_sizes}
        self.failures: dict[Variant, str] = {
            variant: turn.failure
            for turn in journal.turns.values()
            for variant in bench.variants
            if turn.failure is not None and (variant.arm, variant.length) == (turn.arm, turn.length)
        }

    def _plan(self, batch: int) -> list[list[Round]]:
        """Rounds by repetition."""
        bench, experiment = self._bench, self._bench.experiment
        prompts = self._workload.prompts
        groups = make_groups(len(prompts), batch, experiment.seed, list(map(conversation_of, prompts)))
        turns = make_turns(bench.variants, groups, experiment.repetitions, experiment.order, experiment.seed + batch)
        rounds = [Round(batch, list(own)) for _, own in groupby(turns, lambda turn: (turn.repetition, turn.group))]
        return [list(own) for _, own in groupby(rounds, lambda round_: round_.repetition)]

    def rounds(self) -> Iterator[Round]:
        """In their order. What drafters remember of answers is forgotten before each repetition, and before a round
        that runs again."""
        for repetition in range(self._bench.experiment.repetitions):
            for batch, planned in self._planned.items():
                # The same prompts come anew, and would meet their own answers.
                self._bench.forget_finished()
                before: set[int] = set()
                for round_ in planned[repetition]:
                    conversations = self._conversations(round_)
                    # A conversation counts with all its turns.
                    if not before & conversations and self._is_decided(batch):
                        break
                    yield round_
                    before = conversations
                yield from self._again(planned[repetition])

    def _conversations(self, round_: Round) -> set[int]:
        return {conversation_of(self._workload.prompts[place]) for turn in round_.turns for place in turn.prompts}

    def _is_decided(self, batch: int) -> bool:
        if self._decide is None:
            return False
        return self._decide([record for turn in self._counted() if turn.batch == batch for record in turn.requests])

    def _again(self, rounds: Sequence[Round]) -> Iterator[Round]:
        """Those that other processes disturbed, as a whole, since arms are paired. What was measured has no say in it:
        leaving out slow turns would make arms faster."""
        disturbed = [one for one in rounds if self._taken(one) > NOISE_LIMIT]
        for round_ in disturbed[: self._bench.experiment.rerun_disturbed]:
            self._bench.forget_finished()
            yield replace(round_, attempt=1)

    def _taken(self, round_: Round) -> float:
        """The share of the machine that other processes took in the worst of its turns; 0 of those that are too short
        to know."""
        spans = [turn.span for turn in self._finished(round_) if turn.span is not None]
        return max((span.taken for span in spans), default=0.0)

    def _finished(self, round_: Round) -> list[FinishedTurn]:
        turns = self._journal.turns
        return [turns[key] for turn in round_.turns if (key := round_.key(turn)) in turns]

    def missing(self, round_: Round) -> list[Turn[Variant]]:
        """Turns that have not run, in their order; variants that failed run no more."""
        return [
            turn
            for turn in round_.turns
            if turn.what not in self.failures and round_.key(turn) not in self._journal.turns
        ]

    def num_left(self) -> int:
        """Turns to run, warm-up included."""
        bench = self._bench
        unfinished = sum(map(bool, self._missing_by_batch().values()))
        warm_up = bench.experiment.warmup * unfinished * len(bench.variants)
        return warm_up + sum(self._missing_by_batch().values())

    def _missing_by_batch(self) -> dict[int, int]:
        return {
            batch: sum(len(self.missing(one)) for own in planned for one in own)
            for batch, planned in self._planned.items()
        }

    def warm_up(self, on_turn: OnTurn) -> None:
        """Runs each variant at each batch size of which turns are missing."""
        for batch in [batch for batch, missing in self._missing_by_batch().items() if missing]:
            for _ in range(self._bench.experiment.warmup):
                for variant in self._bench.variants:
                    if variant not in self.failures:
                        on_turn(f"batch {batch}, warm-up, {variant.label}")
                        self._warm_up(batch, variant)

    def _warm_up(self, batch: int, variant: Variant) -> None:
        try:
            warm_up(self._bench, self._workload, batch, variant)
        except DovetailError as error:
            self.failures[variant] = failure_of(variant, error, self._bench.experiment)

    def run(self, round_: Round, on_turn: OnTurn) -> bool:
        """Runs what is missing of a round. Returns whether something was."""
        missing = self.missing(round_)
        for turn in missing:
            on_turn(f"{round_.label}, {turn.what.label}")
            self._journal.append(self._run(round_, turn))
        return bool(missing)

    def _run(self, round_: Round, turn: Turn[Variant]) -> FinishedTurn:
        variant = turn.what
        try:
            return run_turn(self._bench, self._workload, round_.batch, turn, round_.attempt)
        except DovetailError as error:
            self.failures[variant] = failure_of(variant, error, self._bench.experiment)
            return FinishedTurn(variant.arm, variant.length, *round_.key(turn)[:4], failure=str(error))

    def measured(self) -> Measured:
        """What counts of what has finished."""
        counted = self._counted()
        return Measured(
            [record for turn in counted for record in turn.requests],
            [record for turn in counted for record in turn.steps],
            [turn.span for turn in counted if turn.span is not None],
            self.failures,
            self._extent(),
        )

    def _counted(self) -> list[FinishedTurn]:
        """In the order in which they ran: of each round the less disturbed time, variants that failed left out."""
        failed = {(variant.arm, variant.length) for variant in self.failures}
        keys = {turn.key for one in self._all() for turn in self._finished(min(self._times(one), key=self._taken))}
        turns = self._journal.turns
        return [turn for key, turn in turns.items() if key in keys and (turn.arm, turn.length) not in failed]

    def _all(self) -> Iterator[Round]:
        return (one for planned in self._planned.values() for own in planned for one in own)

    def _times(self, round_: Round) -> list[Round]:
        """The times that a round has run as a whole; at least its first."""
        again = replace(round_, attempt=1)
        return [round_, again] if self._finished(again) and not self.missing(again) else [round_]

    def _extent(self) -> Extent:
        planned = {batch: sum(len(one.turns) for own in p for one in own) for batch, p in self._planned.items()}
        measured = {batch: planned[batch] - missing for batch, missing in self._missing_by_batch().items()}
        decided = None if self._decide is None else [batch for batch in planned if self._is_decided(batch)]
        return Extent(
            planned,
            measured,
            self._journal.num_sessions,
            sum(not self.missing(one) for one in self._all()),
            sum(self._taken(one) > NOISE_LIMIT for one in self._all()),
            sum(len(self._times(one)) - 1 for one in self._all()),
            decided,
            self._journal.run,
        )


def measure(course: Course, on_turn: OnTurn, limit: TimeLimit) -> None:
    """Runs what is missing, until the limit; at least one round, and rounds as a whole, since arms are paired."""
    course.warm_up(on_turn)
    for round_ in course.rounds():
        if course.run(round_, on_turn) and limit.is_passed():
            break
