"""The two halves of an engine's step, deciding and executing, for drivers that do something in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dovetail.contracts.pausing import EngineConflict
from dovetail.contracts.scheduler import RequestStatus
from dovetail.engine.core import EngineCore
from dovetail.engine.exclusive_use import ExclusiveUse, exclusive
from dovetail.engine.pausing import Pausing
from dovetail.engine.request_table import RequestTable
from dovetail.engine.step import Step
from dovetail.engine.step_update import StepUpdate
from dovetail.engine.telemetry import Telemetry


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledStep:
    """A step that `LLMEngine.schedule` decided on, and that `LLMEngine.execute_step` executes once."""

    step_id: int | None
    """Counts the engine's steps. None: nothing is computed, and executing reports what ended meanwhile (a request whose
    grammar or adapter was refused, what a pause brought)."""
    request_ids: tuple[str, ...]
    """In the order of the batch; a request with several completions is there once for each. Empty too where all
    requests of a step were aborted: it must be executed nevertheless."""
    num_tokens: tuple[int, ...]
    """How many tokens are computed for each of them; drafts count."""
    is_running: bool
    """Whether the workers have it already. So it is where executors overlap steps (`Executor.max_in_flight`), from the
    second step of a batch on in which nobody asks for log probabilities: the step before brought it along."""


@dataclass(slots=True)
class OpenStep:
    """A step between its halves."""

    update: StepUpdate
    """What is to be reported of the time before it."""
    step: Step | None
    """None: there is nothing to compute."""


class SteppedEngine(Protocol):
    """Whose steps these are."""

    @property
    def core(self) -> EngineCore:
        """The step loop of sequences."""

    def end_all(self, error: BaseException) -> None:
        """Ends all requests because of an error."""


class StepLoop:
    """The steps of one engine. `step` is `schedule` and `execute`, without a record of what was scheduled."""

    def __init__(
        self,
        engine: SteppedEngine,
        use: ExclusiveUse,
        pausing: Pausing,
        requests: RequestTable,
        telemetry: Telemetry,
        take_news: Callable[[StepUpdate], None],
        note_rest: Callable[[], None],
    ):
        """`take_news`: applies what came since the last step, and adds the ends of requests. `note_rest`: a step is
        over."""
        self.use = use
        self._engine = engine
        self._pausing = pausing
        self._requests = requests
        self._telemetry = telemetry
        self._take_news = take_news
        self._note_rest = note_rest
        self._open: OpenStep | None = None
        self._scheduled: ScheduledStep | None = None
        """The record of it that can be executed."""

    @property
    def has_open(self) -> bool:
        """Whether a step is between its halves."""
        return self._open is not None

    @exclusive
    def step(self) -> StepUpdate | None:
        """See `TokenEngine.step`."""
        opened = self._begin()
        return None if opened is None else self._complete(opened)

    @exclusive
    def schedule(self) -> ScheduledStep | None:
        """See `LLMEngine.schedule`."""
        before, opened = self._open, self._begin()
        if opened is None:
            self._scheduled = None
        elif self._scheduled is None or opened is not before:
            self._scheduled = self._record(opened.step)
        return self._scheduled

    @exclusive
    def check(self, scheduled: ScheduledStep) -> None:
        """Raises `EngineConflict` for another step than the one that can be executed."""
        if self._open is None or scheduled is not self._scheduled or not self._is_next(self._open):
            raise EngineConflict(
                "this step cannot be executed: it was executed before, is another engine's, or requests were aborted"
                " or the engine paused since it was scheduled. Nothing has changed; schedule() has the step to execute"
            )

    @exclusive
    def execute(self, scheduled: ScheduledStep) -> StepUpdate:
        """See `LLMEngine.execute_step`."""
        self.check(scheduled)
        assert self._open is not None
        return self._complete(self._open)

    def requests_ended(self) -> None:
        """Requests were ended from outside: what was scheduled for them must not be executed unseen."""
        self._scheduled = None

    def _begin(self) -> OpenStep | None:
        """The step that was begun and not executed, or another; None where there is nothing to do."""
        if self._open is not None and self._is_next(self._open):
            return self._open
        if self._open is not None and self._open.update.has_news:
            # A pause has committed the step that was open; this was to be reported with it.
            self._pausing.updates.appendleft(self._open.update)
        self._open = None
        if self._pausing.updates:
            self._open = OpenStep(self._pausing.updates.popleft(), None)
            return self._open
        update = StepUpdate()
        try:
            self._take_news(update)
            step = self._engine.core.schedule()
        except BaseException as error:
            self._engine.end_all(error)
            raise
        if step is not None or update.has_news:
            self._open = OpenStep(update, step)
        else:
            self._note_rest()
        return self._open

    def _complete(self, opened: OpenStep) -> StepUpdate:
        self._open = self._scheduled = step = None
        try:
            if opened.step is not None:
                step = self._engine.core.execute()
                self._requests.add_step(step, opened.update)
        except BaseException as error:
            self._engine.end_all(error)
            raise
        if step is not None and self._telemetry.listening:
            self._telemetry.step_done(step)
        self._note_rest()
        return opened.update

    def _is_next(self, opened: OpenStep) -> bool:
        return opened.step is None or self._engine.core.next_step is opened.step

    def _record(self, step: Step | None) -> ScheduledStep:
        if step is None:
            return ScheduledStep(None, (), (), is_running=False)
        schedule = step.schedule
        left = [
            (sequence.request_id, num_tokens)
            for sequence, num_tokens in zip(schedule.requests, schedule.num_tokens, strict=True)
            if sequence.status is not RequestStatus.FINISHED
        ]
        return ScheduledStep(
            step.plan.step_id,
            tuple(request_id for request_id, _ in left),
            tuple(num_tokens for _, num_tokens in left),
            is_running=self._engine.core.is_in_flight(step),
        )
