"""One step of the engine, from its schedule to its committed tokens, and steps in flight.

While steps are in flight, the next is scheduled as if they had ended: each request that reaches its end gets one token
from each, which only the workers know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

from dovetail.contracts.pooling_params import PooledStates
from dovetail.contracts.scheduler import RequestStatus, Schedule
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.engine.sequence import Sequence

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sequence ended."""

    finish_reason: str
    stop_reason: int | str | None = None
    error: str | None = None
    pooled: PooledStates | None = None
    """The result of a sequence that was pooled."""


@dataclass(slots=True)
class Step:
    """What was decided, what came of it, and what it changed. Once it is committed, its tokens are in the sequences."""

    schedule: Schedule
    plan: StepPlan
    entered: list[Sequence]
    """Sequences that the plan brings to the workers: they came, or came back, into the batch."""
    started: float
    """time.monotonic() when scheduling began; once it is committed, when the workers could begin with it."""
    cohort: int = -1
    """Whose turn it is, where there are cohorts (`Cohorts`); -1: nobody's."""
    future: Future[StepResult] = field(init=False)
    """Once it is handed over."""
    gains: list[bool] = field(init=False)
    """While lifted: for each request of the schedule, whether it gets a token."""
    result: StepResult = field(init=False)
    """This and the following: once it is committed."""
    ended: float = field(init=False)
    """time.monotonic()."""
    first_tokens: list[Sequence] = field(default_factory=list)
    """Sequences that got their first output token."""
    endings: list[tuple[Sequence, Ending]] = field(default_factory=list)
    accepted_spans: dict[int, tuple[int, int]] | None = None
    """By seq_id: position in the output of the first draft token that the step accepted, and how many. None: no draft
    token was accepted."""
    num_prompt_tokens: int = 0
    """Tokens computed before the first output token of their sequence."""

    @property
    def allows_another(self) -> bool:
        """Whether the next step should be scheduled before this one's tokens are known: they are not known already,
        nor did it fail, and nobody looks at each token before deciding what comes next (as those do who ask for log
        probabilities, beam search for one), nor ends without a token, as those do that are pooled."""
        return not self.future.done() and all(
            sequence.sampling.logprobs is None and sequence.pooling is None for sequence in self.schedule.requests
        )

    def lift(self) -> None:
        """Counts as computed what the step computes. Undone by `lower`."""
        self.gains = []
        for sequence, count in zip(self.schedule.requests, self.schedule.num_tokens, strict=True):
            computed = sequence.num_computed_tokens + count
            gains = computed >= sequence.num_tokens
            self.gains.append(gains)
            if sequence.status is not RequestStatus.FINISHED:
                sequence.num_computed_tokens = computed
                sequence.num_tokens += gains

    def lower(self) -> None:
        """Counts only what is known. Also for sequences that gave way meanwhile: committing the step's tokens adds the
        same again, so that their counts are right afterwards."""
        for sequence, count, gains in zip(self.schedule.requests, self.schedule.num_tokens, self.gains, strict=True):
            if sequence.status is not RequestStatus.FINISHED:
                sequence.num_computed_tokens -= count
                sequence.num_tokens -= gains


def may_follow(flights: deque[Step]) -> bool:
    """Whether a step can be scheduled behind those in flight, of which there is one at least.

    Behind several, no request may be admitted again that a step preempted after it was scheduled, since the plan would
    have to name tokens that nobody knows; none may compute more than one token behind its last, for which it has no
    block; and none may be passed over (held, say) by a step behind its own: workers know the tokens of the step before.
    """
    if not flights[-1].allows_another:
        return False
    if len(flights) == 1:
        return True
    last = set(flights[-1].plan.seq_ids)
    return all(
        sequence.status is RequestStatus.RUNNING
        and sequence.num_tokens + len(flights) <= sequence.max_total_tokens
        and sequence.seq_id in last
        for flight in flights
        for sequence in flight.schedule.requests
        if sequence.status is not RequestStatus.FINISHED
    )


def drop_ended(step: Step) -> None:
    """Leaves out the sequences that ended after the step was planned: what it computed for them is thrown away."""
    schedule, plan, result = step.schedule, step.plan, step.result
    left = [i for i, s in enumerate(schedule.requests) if s.status is not RequestStatus.FINISHED]
    if len(left) == len(schedule.requests):
        return
    counts = result.counts if result.counts is not None else [1] * len(schedule.requests)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    index = {before: now for now, before in enumerate(left)}

    def kept(entries: Mapping[int, Value]) -> dict[int, Value]:
        return {index[before]: value for before, value in entries.items() if before in index}

    drafts = None if plan.num_drafts is None else [plan.num_drafts[i] for i in left]
    num_tokens = [schedule.num_tokens[i] for i in left]
    step.schedule = Schedule([schedule.requests[i] for i in left], num_tokens, schedule.preempted)
    step.plan = replace(plan, seq_ids=[plan.seq_ids[i] for i in left], num_tokens=num_tokens, num_drafts=drafts)
    step.result = replace(
        result,
        token_ids=[token for i in left for token in result.token_ids[starts[i] : starts[i + 1]]],
        counts=[counts[i] for i in left],
        logprobs=kept(result.logprobs),
        prompt_logprobs=kept(result.prompt_logprobs),
        num_next_drafts=kept(result.num_next_drafts),
        next_drafts=kept(result.next_drafts),
        draft_counts=kept(result.draft_counts),
        failed=kept(result.failed),
        drafter_errors=kept(result.drafter_errors),
        pooled=kept(result.pooled),
    )
