"""`AsyncLLMEngine`: the engine for asyncio. The step loop runs in a thread of its own; the event loop only hands requests
in and outputs out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import DovetailError, RequestError
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.engine import LLMEngine
from dovetail.engine.input_processor import Prompt
from dovetail.kv.pool import PrefixCacheReset
from dovetail.outputs import RequestOutput
from dovetail.tokenization import Tokenizer


class _Stream:
    """Outputs on their way from the engine's thread to one consumer."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.queue: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()


class AsyncLLMEngine:
    """Requests from coroutines, batched together.

    `generate` may be called from any event loop and any number of times at once. Closing (or cancelling) a stream
    aborts its request. Use as a context manager, or call `shutdown`.
    """

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        self._ids = itertools.count()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._failure: BaseException | None = None
        self._streams: dict[str, _Stream] = {}
        # One thread: tokenizing must not hold the event loop, nor take cores from the model.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="dovetail-input")
        self._thread = threading.Thread(target=self._run, name="dovetail-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any] | None = None,
        *,
        options: Iterable[str] = (),
        **keywords: Any,
    ) -> AsyncLLMEngine:
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
        return self._failure is None and not self._stopping

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
        self._check_running()
        loop = asyncio.get_running_loop()
        request_id = request_id if request_id is not None else f"async-{next(self._ids)}"
        arrival = time.monotonic()
        processed = await loop.run_in_executor(
            self._tokenizing, self._engine.process_input, prompt, sampling_params
        )
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is in use")
        stream = self._streams[request_id] = _Stream(loop)
        finished = False

        def add() -> None:
            try:
                self._engine.add_request(
                    request_id, processed, priority=priority, arrival_time=arrival, cache_salt=cache_salt
                )
            except DovetailError as error:
                self._deliver([(stream, error)])

        try:
            self._submit(add)
            while not finished:
                item = await stream.queue.get()
                if isinstance(item, BaseException):
                    finished = True
                    raise item
                finished = item.finished
                if item.error is not None:
                    raise RequestError(f"request {request_id} failed: {item.error}")
                yield item
        finally:
            self._streams.pop(request_id, None)
            if not finished:
                self._submit(lambda: self._abort(request_id))

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream yields a last output with finish_reason "abort"."""
        await self._call(lambda: self._publish(self._engine.abort_request(request_id)))

    async def reset_prefix_cache(self) -> PrefixCacheReset:
        """See `LLMEngine.reset_prefix_cache`; runs between two steps."""
        return await self._call(self._engine.reset_prefix_cache)

    def shutdown(self) -> None:
        """Stops the loop and the engine. Streams that are open end with an error. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        self._tokenizing.shutdown()

    def __enter__(self) -> AsyncLLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _check_running(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise RequestError("the engine is shut down")

    def _submit(self, command: Callable[[], None]) -> None:
        """Has the engine's thread run something between two steps."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    async def _call(self, function: Callable[[], Any]) -> Any:
        self._check_running()
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._submit(run)
        return await asyncio.wrap_future(future)

    def _abort(self, request_id: str) -> None:
        self._engine.abort_request(request_id)

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while self._wait_for_work():
                while self._commands:
                    self._commands.popleft()()
                if self._engine.has_unfinished_requests():
                    self._publish(self._engine.step())
            error: BaseException = RequestError("the engine was shut down before the request finished")
        except BaseException as failure:
            error = failure
            self._failure = failure
        self._stopping = True
        self._deliver([(stream, error) for stream in list(self._streams.values())])
        for command in list(self._commands):
            command()
        self._engine.shutdown()

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to do; False when it is time to stop."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._stopping or self._commands or self._engine.has_unfinished_requests()
            )
            return not self._stopping

    def _publish(self, outputs: list[RequestOutput]) -> None:
        items: list[tuple[_Stream, RequestOutput | BaseException]] = []
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                items.append((stream, output))
        self._deliver(items)

    def _deliver(self, items: list[tuple[_Stream, Any]]) -> None:
        """Hands items over, with one wake-up per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Any]]] = {}
        for stream, item in items:
            by_loop.setdefault(stream.loop, []).append((stream, item))
        for loop, batch in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop was closed; nobody listens any more
                loop.call_soon_threadsafe(_put_all, batch)


def _put_all(batch: list[tuple[_Stream, RequestOutput | BaseException]]) -> None:
    for stream, item in batch:
        stream.queue.put_nowait(item)
