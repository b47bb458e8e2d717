"""Steps in flight. While they run, the next is scheduled as if they had ended: each request that reaches its end gets
one token from each, which only the workers know."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

from dovetail.contracts.scheduler import RequestStatus, Schedule
from dovetail.contracts.step import StepPlan, StepResult
from dovetail.engine.sequence import Sequence

Value = TypeVar("Value")


@dataclass(slots=True)
class Flight:
    """One step between its plan and its tokens."""

    schedule: Schedule
    plan: StepPlan
    future: Future[StepResult]
    entered: list[Sequence]
    """Sequences that the plan brings to the workers."""
    started: float
    gains: list[bool] = field(default_factory=list)
    """While lifted: for each request of the schedule, whether it gets a token."""

    @property
    def allows_another(self) -> bool:
        """Whether the next step should be scheduled before this one's tokens are known: they are not known already,
        nor did it fail, and nobody looks at each token before deciding what comes next (as those do who ask for log
        probabilities, beam search for one)."""
        return not self.future.done() and all(sequence.sampling.logprobs is None for sequence in self.schedule.requests)

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


def may_follow(flights: deque[Flight]) -> bool:
    """Whether a step can be scheduled behind those in flight, of which there is one at least.

    Behind several, no request may be admitted again that a step preempted after it was scheduled, since the plan would
    have to name tokens that nobody knows; none may compute more than one token behind its last, for which it has no
    block; and none may be passed over (held, say) by a step behind its own: workers know the tokens of the step before.
    """
    if not flights[-1].allows_another:
        return False
    if len(flights) == 1:
        return True
    last = set(flights[-1].plan.keys)
    return all(
        sequence.status is RequestStatus.RUNNING
        and sequence.num_tokens + len(flights) <= sequence.max_total_tokens
        and sequence.key in last
        for flight in flights
        for sequence in flight.schedule.requests
        if sequence.status is not RequestStatus.FINISHED
    )


def live_part(schedule: Schedule, plan: StepPlan, result: StepResult) -> tuple[Schedule, StepPlan, StepResult]:
    """The step without the sequences that ended after it was planned: what it computed for them is thrown away."""
    places = [i for i, s in enumerate(schedule.requests) if s.status is not RequestStatus.FINISHED]
    if len(places) == len(schedule.requests):
        return schedule, plan, result
    counts = result.counts if result.counts is not None else [1] * len(schedule.requests)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    index = {place: new for new, place in enumerate(places)}

    def kept(entries: Mapping[int, Value]) -> dict[int, Value]:
        return {index[place]: value for place, value in entries.items() if place in index}

    drafts = None if plan.num_drafts is None else [plan.num_drafts[place] for place in places]
    num_tokens = [schedule.num_tokens[place] for place in places]
    return (
        replace(schedule, requests=[schedule.requests[place] for place in places], num_tokens=num_tokens),
        replace(plan, keys=[plan.keys[place] for place in places], num_tokens=num_tokens, num_drafts=drafts),
        replace(
            result,
            token_ids=[token for place in places for token in result.token_ids[starts[place] : starts[place + 1]]],
            counts=[counts[place] for place in places],
            logprobs=kept(result.logprobs),
            prompt_logprobs=kept(result.prompt_logprobs),
            num_next_drafts=kept(result.num_next_drafts),
            draft_counts=kept(result.draft_counts),
            failed=kept(result.failed),
            drafter_errors=kept(result.drafter_errors),
        ),
    )
