"""An engine's pauses: requests that came before one end, run on or are held; those that come meanwhile are held."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol

from dovetail.contracts.pausing import EngineConflict, PauseMode, as_pause_mode
from dovetail.engine.core import EngineCore
from dovetail.engine.exclusive_use import ExclusiveUse, exclusive
from dovetail.engine.request_table import RequestTable
from dovetail.engine.sequence import Sequence
from dovetail.engine.step import Ending
from dovetail.engine.step_update import StepUpdate
from dovetail.engine.telemetry import Telemetry


class PausedEngine(Protocol):
    """What is paused."""

    @property
    def core(self) -> EngineCore:
        """The step loop."""

    @property
    def request_ids(self) -> list[str]:
        """Requests that are not finished."""

    def is_sleeping(self) -> bool:
        """Whether nothing can be computed."""

    def check_generates(self, drafter: str | None) -> None:
        """Raises `EngineConflict` where nothing is generated now, with this drafter."""

    def end_all(self, error: BaseException) -> None:
        """Ends all requests because of an error."""

    def end_requests(self, request_ids: list[str], ending: Ending, update: StepUpdate) -> None:
        """Ends some requests, and adds that to `update`."""


class Pausing:
    """The pause of one engine, if it has one. What a pause ends or lands is reported by the steps after it."""

    def __init__(
        self,
        engine: PausedEngine,
        use: ExclusiveUse,
        requests: RequestTable,
        telemetry: Telemetry,
        notify: Callable[[], None],
    ):
        """`notify`: wakes whoever drives the engine."""
        self.use = use
        self.updates: deque[StepUpdate] = deque()
        """What the next steps return, before any other step runs."""
        self._engine = engine
        self._requests = requests
        self._telemetry = telemetry
        self._notify = notify
        self._mode: PauseMode | None = None
        self._running: set[str] = set()
        """Requests that a pause lets finish."""
        self._waits: list[Future[None]] = []
        """Done when these have ended."""

    @property
    def is_paused(self) -> bool:
        """Whether new requests are held. From any thread."""
        return self._mode is not None

    @exclusive
    def pause(self, mode: PauseMode = "abort") -> Future[None]:
        """Computes nothing for requests that come from now on, until `resume`. The future is done when nothing is
        computed for the others either: at once for "abort" and "keep", with their last ends for "wait". A paused engine
        may be paused again, in another mode too. Raises `RequestError` for what is no mode."""
        mode = as_pause_mode(mode)
        self._mode = mode
        done: Future[None] = Future()
        self._waits.append(done)
        if mode == "wait":
            # Those that somebody holds would never end: they are held by the pause too.
            self._hold(sequence for sequence in self._sequences() if sequence.is_asked_to_hold)
            self._running = {sequence.request_id for sequence in self._sequences() if not sequence.is_paused}
        else:
            self._land()
            if mode == "abort":
                update = StepUpdate()
                self._engine.end_requests(self._engine.request_ids, Ending("abort"), update)
                if update.has_news:
                    self.updates.append(update)
            self._hold(self._sequences())
            self._running = set()
        self.note_ends()
        self._notify()
        return done

    @exclusive
    def resume(self) -> None:
        """Requests go on from where they are. Without effect where nothing is paused. Raises `EngineConflict` while the
        engine sleeps, or weights are invalid that held requests need."""
        if self._engine.is_sleeping() and self.is_paused:
            raise EngineConflict("a paused engine that sleeps cannot resume: call wake_up first")
        for drafter in {sequence.drafter for sequence in self._sequences()}:
            self._engine.check_generates(drafter)
        self._mode, self._running = None, set()
        for sequence in self._sequences():
            sequence.pause(False)
        self.note_ends()
        self._notify()

    def admit(self, sequences: Iterable[Sequence]) -> None:
        """New ones, which a pause holds."""
        if self.is_paused:
            self._hold(sequences)

    def note_ends(self) -> None:
        """Requests may have ended: a pause that lets them finish may be complete."""
        if self._waits and self._running.isdisjoint(self._engine.request_ids):
            self._running = set()
            waits, self._waits = self._waits, []
            for done in waits:
                done.set_result(None)

    @property
    def holds_all(self) -> bool:
        """Whether a pause holds every request that is not finished."""
        return all(sequence.is_paused for sequence in self._sequences())

    def give_up_memory(self) -> None:
        """All requests give up their KV blocks, before the engine sleeps or its weights change; they are computed
        again. Raises `EngineConflict` where some would go on meanwhile."""
        if not self._engine.request_ids:
            return
        if not self.holds_all:
            raise EngineConflict(
                "the engine cannot sleep while requests are unfinished, held ones included: let them end, or abort"
                ' them, or pause it (mode "keep" computes them again after wake_up)'
            )
        try:
            self._engine.core.preempt_all()
        except BaseException as error:
            self._engine.end_all(error)
            raise

    def _land(self) -> None:
        """Commits the steps in flight, so that nothing is computed and no token is lost."""
        try:
            for step in self._engine.core.land_all():
                update = StepUpdate()
                self._requests.add_step(step, update)
                if self._telemetry.listening:
                    self._telemetry.step_done(step)
                self.updates.append(update)
        except BaseException as error:
            self._engine.end_all(error)
            raise

    def _hold(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.pause(True)

    def _sequences(self) -> list[Sequence]:
        return [sequence for entry in self._requests.entries() for sequence in entry.sequences]
