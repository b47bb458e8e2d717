"""The thread that drives an engine for coroutines: it runs steps while there is work, and between two steps what it was
asked to. It knows nothing of whoever started it, so that an `AsyncLLMEngine` that is dropped can be collected."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from dovetail.contracts.errors import RequestError, WorkerError
from dovetail.contracts.outputs import RequestOutput
from dovetail.engine.engine import LLMEngine
from dovetail.engine.failure import raised_elsewhere
from dovetail.engine.output_stream import OutputStream, put_all
from dovetail.engine.token_engine import SHUTDOWN_S

Value = TypeVar("Value")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Command:
    """Something to do between two steps, or to refuse when the engine has ended."""

    run: Callable[[], None]
    refuse: Callable[[BaseException], object]


class StepThread:
    """Owns an engine, the thread that drives it, and the streams of the requests that run."""

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        self._wake = engine.wakeup
        """Guards the three below. Re-entrant: garbage collection may call `stop` anywhere."""
        self._commands: deque[_Command] = deque()
        self._is_stopping = False
        self._end: BaseException | None = None
        """Why no more commands are taken."""
        self._streams: dict[str, OutputStream] = {}
        """By request id; the thread's, until it is given up."""
        self._thread = threading.Thread(target=self._run, name="dovetail-engine", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    @property
    def is_running(self) -> bool:
        """Whether commands are taken."""
        return self._engine.use.is_in_this_process and self._end is None and not self._is_stopping

    @property
    def errored(self) -> bool:
        """Whether an error ended the engine, rather than `stop`."""
        return self._end is not None and not self._is_stopping

    def check_running(self) -> None:
        """Raises why no commands are taken: `RequestError` after a shutdown, or what ended the engine."""
        self._engine.use.check_process()
        if self._end is not None:
            raise raised_elsewhere(self._end)
        if self._is_stopping:
            raise shut_down()

    async def open_stream(self, stream: OutputStream, add: Callable[[], None]) -> None:
        """Runs `add`, which adds a request, and has its outputs go to `stream` from then on. Raises what `add`
        raises."""

        def run() -> None:
            add()
            self._streams[stream.request_id] = stream

        try:
            await self.call(run)
        except asyncio.CancelledError:
            self.close_stream(stream)
            raise

    def close_stream(self, stream: OutputStream) -> None:
        """Nobody reads it any more: aborts its request."""
        if self._engine.use.is_in_this_process:
            self._submit(_Command(lambda: self._abandon(stream), lambda end: None))

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream gets its last output, or the scheduler's error, which is raised here too."""
        await self.call(lambda: self._abort(request_id))

    async def call(self, function: Callable[[], Value]) -> Value:
        """What `function` returns or raises in the thread, between two steps."""
        future: Future[Value] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(_told(error))

        def refuse(end: BaseException) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(raised_elsewhere(end))

        self._engine.use.check_process()
        self._submit(_Command(run, refuse))
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Has the thread end, and the engine with it, after the step that runs. Does not wait; from any thread."""
        if not self._engine.use.is_in_this_process:
            return  # a fork has this object, but not the thread, and nobody to give back the lock
        with self._wake:
            self._is_stopping = True
            self._wake.notify_all()

    def end(self, timeout_s: float = SHUTDOWN_S) -> None:
        """As `stop`, and waits; a step that lasts longer than `timeout_s` is dealt with as `LLMEngine.shutdown` says.
        Streams and calls that are open fail. Idempotent."""
        self.stop()
        if not self._engine.use.is_in_this_process or self._thread is threading.current_thread():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._engine.shutdown(timeout_s=0)
            if self._engine.is_closed:
                self._thread.join(timeout_s)
            self._fail_all(shut_down())

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                while self._commands:
                    self._commands.popleft().run()
                if self._engine.is_runnable:
                    self._step()
            end: BaseException = shut_down()
        except BaseException as failure:
            if self._is_stopping:  # the step was interrupted
                end = shut_down()
                end.__cause__ = failure
            else:
                logger.exception("the engine stopped")
                end = failure
        self._fail_all(end)
        self._engine.shutdown()
        atexit.unregister(self.end)

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to do, while all requests are held too; False when it is time to stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._is_stopping or self._commands or self._engine.is_runnable)
            return not self._is_stopping

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except WorkerError:
            raise
        except BaseException as error:
            # A plugin's, SystemExit and its like too, since no signal arrives in this thread. The engine has ended all
            # requests and can go on, as it does for `LLM`; only an engine whose workers are gone cannot.
            logger.exception("a step failed")
            self._fail_ended(error)
        else:
            self._publish(outputs)

    def _abort(self, request_id: str) -> None:
        try:
            outputs = self._engine.abort_request(request_id)
        except BaseException as error:
            self._fail_ended(error)
            raise
        self._publish(outputs)

    def _fail_ended(self, error: BaseException) -> None:
        """Ends the streams whose requests ended without a last output."""
        running = set(self._engine.request_ids)
        ended = [self._streams.pop(request_id) for request_id in self._streams.keys() - running]
        put_all([(stream, raised_elsewhere(error)) for stream in ended])

    def _publish(self, outputs: list[RequestOutput]) -> None:
        items = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                items.append((stream, output))
                if output.finished:
                    del self._streams[output.request_id]
        for stream in put_all(items):
            self._abandon(stream)

    def _abandon(self, stream: OutputStream) -> None:
        """Aborts the request of a stream that nobody reads any more; the id may be another's by now. Raises nothing:
        whoever could be told has left, and the other requests go on."""
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            try:
                self._engine.abort_request(stream.request_id)
            except BaseException:
                logger.exception("aborting request %s failed", stream.request_id)

    def _submit(self, command: _Command) -> None:
        with self._wake:
            end = self._end
            if end is None:
                self._commands.append(command)
                self._wake.notify_all()
        if end is not None:
            command.refuse(end)

    def _fail_all(self, end: BaseException) -> None:
        """Takes no more commands; ends the streams that are open and refuses what was not begun."""
        with self._wake:
            self._end = end = self._end or end
            refused = list(self._commands)
            self._commands.clear()
        streams, self._streams = self._streams, {}
        put_all([(stream, raised_elsewhere(end)) for stream in streams.values()])
        for command in refused:
            command.refuse(end)


def _told(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else raised_elsewhere(error)


def shut_down() -> RequestError:
    """What calls after a shutdown, and requests that it cut off, get."""
    return RequestError("the engine is shut down: requests that were not finished have failed, and no more are taken")
