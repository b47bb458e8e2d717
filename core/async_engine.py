"""`AsyncLLMEngine`: the engine for asyncio. The step loop runs in a thread of its own; the event loop only hands
requests in and outputs out."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dovetail.config.layers import LayeredConfig
from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import RequestError
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.engine import LLMEngine
from dovetail.engine.input_processor import Prompt
from dovetail.kv.manager import KVStatistics
from dovetail.kv.pool import PrefixCacheReset
from dovetail.outputs import RequestOutput
from dovetail.tokenization import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Stream:
    """Outputs on their way from the engine's thread to one consumer."""

    request_id: str
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[RequestOutput | BaseException] = field(default_factory=asyncio.Queue)


@dataclass(frozen=True)
class _Command:
    """Something for the engine's thread to do between two steps, or to refuse when the engine has ended."""

    run: Callable[[], None]
    refuse: Callable[[BaseException], object]


class AsyncLLMEngine:
    """Requests from coroutines, batched together.

    `generate` may be called from any event loop and any number of times at once. Closing (or cancelling) a stream
    aborts its request. Use as a context manager, or call `shutdown`.
    """

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        self._ids = itertools.count()
        self._wake = threading.Condition()
        """Guards the three below."""
        self._commands: deque[_Command] = deque()
        self._stopping = False
        self._end: BaseException | None = None
        """Why the engine takes no more commands."""
        self._streams: dict[str, _Stream] = {}
        """By request id; only the engine's thread looks at it."""
        # One thread: tokenizing must not hold the event loop, nor take cores from the model.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="dovetail-input")
        self._thread = threading.Thread(target=self._run, name="dovetail-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
        *,
        options: Iterable[str] = (),
        **keywords: Any,
    ) -> Self:
        """As `LLMEngine.from_config`."""
        return cls(LLMEngine.from_config(config, options=options, **keywords))

    @property
    def config(self) -> ResolvedConfig:
        """What the configuration came to."""
        return self._engine.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None with tokenizer_mode none."""
        return self._engine.tokenizer

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted: not shut down, and no worker died."""
        return self._end is None and not self._stopping

    @property
    def errored(self) -> bool:
        """Whether the engine ended by an error, rather than by `shutdown`."""
        return self._end is not None and not self._stopping

    async def check_health(self) -> None:
        """Raises what ended the engine, or `RequestError` after `shutdown`; otherwise returns."""
        if not self.is_running:
            raise self._end or _shut_down()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields outputs as they come; the last one has `finished` set.

        Raises `RequestError` for a request that is refused or that failed, `WorkerError` when the engine died.
        Leaving the loop early, or cancelling the task, aborts the request and frees its memory.
        """
        if not self.is_running:
            raise self._end or _shut_down()
        loop = asyncio.get_running_loop()
        request_id = request_id if request_id is not None else f"async-{next(self._ids)}"
        arrival = time.monotonic()
        processed = await loop.run_in_executor(self._tokenizing, self._engine.process_input, prompt, sampling_params)
        stream = _Stream(request_id, loop)

        def add() -> None:
            self._engine.add_request(
                request_id, processed, priority=priority, arrival_time=arrival, cache_salt=cache_salt
            )
            self._streams[request_id] = stream

        self._submit(_Command(lambda: self._try(add, stream), lambda end: self._deliver([(stream, end)])))
        finished = False
        try:
            while not finished:
                item = await stream.queue.get()
                finished = isinstance(item, BaseException) or item.finished
                if isinstance(item, BaseException):
                    raise item
                if item.error is not None:
                    raise RequestError(f"request {request_id} failed: {item.error}")
                yield item
        finally:
            if not finished:
                self._submit(_Command(lambda: self._abandon(request_id, stream), lambda end: None))

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream yields a last output with finish_reason "abort". Unknown ids are passed over."""
        await self._call(lambda: self._publish(self._engine.abort_request(request_id)))

    async def reset_prefix_cache(self) -> PrefixCacheReset:
        """See `LLMEngine.reset_prefix_cache`; runs between two steps."""
        return await self._call(self._engine.reset_prefix_cache)

    async def sleep(self, level: int = 1) -> int:
        """See `LLMEngine.sleep`; runs between two steps."""
        return await self._call(lambda: self._engine.sleep(level))

    async def wake_up(self) -> None:
        """See `LLMEngine.wake_up`; runs between two steps."""
        await self._call(self._engine.wake_up)

    async def is_sleeping(self) -> bool:
        """See `LLMEngine.is_sleeping`; asked between two steps."""
        return await self._call(self._engine.is_sleeping)

    async def cache_statistics(self) -> KVStatistics:
        """See `LLMEngine.cache_statistics`; runs between two steps."""
        return await self._call(self._engine.cache_statistics)

    def shutdown(self) -> None:
        """Stops after the step that runs, and waits for that. Streams that are open end with an error. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        self._tokenizing.shutdown()

    def __enter__(self) -> AsyncLLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _submit(self, command: _Command) -> None:
        """Has the engine's thread run something between two steps."""
        with self._wake:
            end = self._end
            if end is None:
                self._commands.append(command)
                self._wake.notify()
        if end is not None:
            command.refuse(end)

    async def _call(self, function: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        def refuse(end: BaseException) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(end)

        self._submit(_Command(run, refuse))
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while self._wait_for_work():
                while self._commands:
                    self._commands.popleft().run()
                if self._engine.has_unfinished_requests():
                    self._publish(self._engine.step())
            end: BaseException = _shut_down()
        except BaseException as failure:
            logger.exception("the engine stopped")
            end = failure
        with self._wake:
            self._end = end
            refused = list(self._commands)
            self._commands.clear()
        self._deliver([(stream, end) for stream in self._streams.values()])
        self._streams.clear()
        for command in refused:
            command.refuse(end)
        self._engine.shutdown()

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to do; False when it is time to stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._commands or self._engine.has_unfinished_requests())
            return not self._stopping

    def _try(self, add: Callable[[], None], stream: _Stream) -> None:
        try:
            add()
        except Exception as error:  # this request's, not the engine's
            self._deliver([(stream, error)])

    def _abandon(self, request_id: str, stream: _Stream) -> None:
        """Aborts the request of a stream that nobody reads any more; the id may be another's by now."""
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._engine.abort_request(request_id)

    def _publish(self, outputs: list[RequestOutput]) -> None:
        items: list[tuple[_Stream, RequestOutput | BaseException]] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                items.append((stream, output))
                if output.finished:
                    del self._streams[output.request_id]
        for stream in self._deliver(items):
            self._abandon(stream.request_id, stream)

    def _deliver(self, items: list[tuple[_Stream, Any]]) -> list[_Stream]:
        """Hands items over, with one wake-up per event loop. Returns the streams to which nobody listens any more,
        because their loop was closed."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Any]]] = {}
        for stream, item in items:
            by_loop.setdefault(stream.loop, []).append((stream, item))
        lost: list[_Stream] = []
        for loop, batch in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, batch)
            except RuntimeError:  # asyncio has no other word for a closed loop
                lost += [stream for stream, _ in batch]
        return lost


def _put_all(batch: list[tuple[_Stream, RequestOutput | BaseException]]) -> None:
    for stream, item in batch:
        stream.queue.put_nowait(item)


def _shut_down() -> RequestError:
    return RequestError("the engine is shut down: requests that were not finished have failed, and no more are taken")
