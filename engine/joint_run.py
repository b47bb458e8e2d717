"""Several threads that wait for requests of one engine. One of them at a time runs the steps, for all: requests of all
threads are batched together."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dovetail.contracts.errors import RequestError, WorkerError
from dovetail.contracts.outputs import RequestOutput
from dovetail.engine.engine import LLMEngine
from dovetail.engine.failure import raised_elsewhere
from dovetail.engine.progress import GenerationProgress


@dataclass(eq=False)
class JointCall:
    """Requests for whose ends one thread waits."""

    request_ids: Sequence[str]
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    """Last outputs that the thread has seen, by id."""
    news: list[RequestOutput] = field(default_factory=list)
    """Last outputs that it has not seen."""
    error: Exception | None = None
    """What a step raised in another thread."""

    @property
    def is_done(self) -> bool:
        """Whether the thread has seen all last outputs."""
        return len(self.outputs) == len(self.request_ids)

    @property
    def missing(self) -> list[str]:
        """Requests whose last outputs the thread has not seen."""
        return [request_id for request_id in self.request_ids if request_id not in self.outputs]


class JointRun:
    """Brings the requests of each thread to their ends. Makes threads wait for their turn in the engine."""

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        engine.use.share()
        self._changed = threading.Condition()
        """Guards what follows."""
        self._calls: dict[str, JointCall] = {}
        """By the id of each request that has not ended."""
        self._num_calls = 0
        self._is_driven = False
        """A thread runs steps."""
        self._num_alone = 0
        """Threads that want the engine for themselves, or have it."""
        self._has_lone_user = False

    @contextmanager
    def joined(self, request_ids: Sequence[str]) -> Iterator[JointCall]:
        """The calling thread adds these requests, and brings them to their ends by `run`. None is left behind when it
        ends early (an error, or Ctrl-C)."""
        self._engine.use.check_process()
        call = JointCall(request_ids)
        with self._changed:
            self._changed.wait_for(lambda: not self._num_alone)
            self._num_calls += 1
            self._calls.update(dict.fromkeys(request_ids, call))
        try:
            try:
                yield call
            except BaseException:
                self._engine.abort_request(request_ids)
                raise
        finally:
            with self._changed:
                self._num_calls -= 1
                for request_id in request_ids:
                    self._calls.pop(request_id, None)
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other thread has a request, or gets into the engine."""
        self._engine.use.check_process()
        with self._changed:
            self._num_alone += 1
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._num_calls and not self._has_lone_user)
                self._has_lone_user = True
            try:
                with self._engine.use:
                    yield
            finally:
                self._has_lone_user = False
        finally:
            with self._changed:
                self._num_alone -= 1
                self._changed.notify_all()

    def run(self, call: JointCall, progress: GenerationProgress) -> list[RequestOutput]:
        """The last outputs of a call's requests, in order; progress is shown while they come.

        Raises what a step raises, in every thread that waits for a request; `RequestError` for a request that ended
        without a last output.
        """
        self._take_news(call, progress)
        while not call.is_done:
            with self._changed:
                self._changed.wait_for(lambda: not self._is_driven or call.news or call.error)
                drives = not call.news and not call.error
                self._is_driven = self._is_driven or drives
            if call.error is not None:
                raise call.error
            if drives:
                self._drive(call, progress)
            else:
                self._take_news(call, progress)
        return [call.outputs[request_id] for request_id in call.request_ids]

    def _drive(self, call: JointCall, progress: GenerationProgress) -> None:
        """Runs steps until the requests of this call are done."""
        try:
            while not call.is_done:
                self._wait_for_work(call)
                self._step()
                self._take_news(call, progress)
                if progress.is_due:
                    progress.update(self._engine.token_progress(call.missing))
        finally:
            with self._changed:
                self._is_driven = False
                self._changed.notify_all()

    def _wait_for_work(self, call: JointCall) -> None:
        """Sleeps while all requests are held. Raises `RequestError` for a request of the call that ended without a last
        output, `WorkerError` after a shutdown."""
        engine = self._engine
        if engine.is_runnable:
            return

        def lost() -> list[str]:
            known = set(engine.request_ids)
            return [request_id for request_id in call.missing if request_id not in known]

        with engine.wakeup:
            engine.wakeup.wait_for(lambda: engine.is_runnable or engine.is_closed or lost())
        if engine.is_closed:
            raise WorkerError("the engine was shut down while requests were held: they have failed")
        if not engine.is_runnable:
            raise RequestError(
                f"{lost()[0]} ended without a last output: something else aborted it or drove the engine"
            )

    def _step(self) -> None:
        """One step for all. What it raises has ended the requests of every thread."""
        try:
            outputs = self._engine.step()
        except BaseException as error:
            with self._changed:
                for call in set(self._calls.values()):
                    call.error = raised_elsewhere(error)
                self._changed.notify_all()
            raise
        ended = [output for output in outputs if output.finished]
        if ended:
            with self._changed:
                for output in ended:
                    owner = self._calls.pop(output.request_id, None)
                    if owner is not None:
                        owner.news.append(output)
                self._changed.notify_all()

    def _take_news(self, call: JointCall, progress: GenerationProgress) -> None:
        with self._changed:
            news, call.news = call.news, []
        for output in news:
            call.outputs[output.request_id] = output
            progress.finish(output)
