"""Outputs on their way from the engine's thread to one coroutine. What the coroutine has not read yet is merged, so
that a slow reader, or none, costs no more memory than the request itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable

from dovetail.contracts.errors import GrammarError, RequestError
from dovetail.contracts.outputs import CompletionOutput, RequestOutput
from dovetail.engine.step_update import GRAMMAR_REFUSED


class OutputStream:
    """One request's outputs. `put` and `fail` are the engine's to call, `get` and `wake` the event loop's."""

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop):
        self.request_id = request_id
        self.loop = loop
        self._news = asyncio.Event()
        self._lock = threading.Lock()
        """Guards the three below."""
        self._unread: RequestOutput | None = None
        self._error: Exception | None = None
        self._is_waking = False
        """A call of `wake` is on its way to the loop."""

    def put(self, item: RequestOutput | Exception) -> bool:
        """Adds an output, or the error that ends the stream. True: the loop has to be asked to call `wake`."""
        with self._lock:
            if isinstance(item, Exception):
                self._error = item
            else:
                self._unread = item if self._unread is None else merged(self._unread, item)
            asks, self._is_waking = not self._is_waking, True
            return asks

    def push(self, item: RequestOutput | Exception) -> None:
        """As `put`, from the event loop that reads the stream."""
        if self.put(item):
            self.wake()

    def wake(self) -> None:
        """There is something to read."""
        self._news.set()

    async def get(self) -> RequestOutput:
        """All that came since the last call, as one output. Raises the error that ended the stream after that."""
        while True:
            with self._lock:
                output, self._unread = self._unread, None
                if output is not None:
                    return output
                if self._error is not None:
                    raise self._error
                if self._news.is_set():
                    self._news.clear()
                    self._is_waking = False
            await self._news.wait()


class OutputReader:
    """What reads an `OutputStream`; a `RequestStream` of the contract `EngineClient`."""

    def __init__(self, stream: OutputStream, close: Callable[[OutputStream], None]):
        """`close` aborts the request of a stream that nobody reads any more."""
        self.request_id = stream.request_id
        self._stream = stream
        self._close = close
        self._is_over = False

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        try:
            output = await self._stream.get()
        except Exception:
            self._is_over = True
            raise
        self._is_over = output.finished
        if output.error is not None:
            if any(completion.stop_reason == GRAMMAR_REFUSED for completion in output.outputs):
                raise GrammarError(output.error)
            raise RequestError(f"request {self.request_id} failed: {output.error}")
        return output

    def fail(self, error: Exception) -> None:
        """Aborts the request, and ends the stream with an error, behind what nobody read yet."""
        self._close(self._stream)
        if self._stream.put(error):
            self._stream.wake()

    def close(self) -> None:
        """Aborts the request, unless its last output was read. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._close(self._stream)


def put_all(items: Iterable[tuple[OutputStream, RequestOutput | Exception]]) -> list[OutputStream]:
    """Puts each item into its stream, with one wake-up per event loop. Returns the streams to which nobody listens any
    more, because their loop was closed."""
    asleep: dict[asyncio.AbstractEventLoop, list[OutputStream]] = {}
    lost = []
    for stream, item in items:
        if stream.loop.is_closed():
            lost.append(stream)
        elif stream.put(item):
            asleep.setdefault(stream.loop, []).append(stream)
    for loop, streams in asleep.items():
        try:
            loop.call_soon_threadsafe(_wake_all, streams)
        except RuntimeError:  # asyncio has no other word for a loop that was closed meanwhile
            lost += streams
    return lost


def _wake_all(streams: list[OutputStream]) -> None:
    for stream in streams:
        stream.wake()


def joined(older: list[RequestOutput], newer: list[RequestOutput]) -> list[RequestOutput]:
    """Outputs of two steps, one of each request. Takes both over."""
    found = {output.request_id: output for output in older}
    for output in newer:
        before = found.get(output.request_id)
        found[output.request_id] = output if before is None else merged(before, output)
    return list(found.values())


def merged(older: RequestOutput, newer: RequestOutput) -> RequestOutput:
    """Two consecutive outputs of a request as one. Takes both over."""
    if not newer.is_delta:
        return newer
    unread = {completion.index: completion for completion in older.outputs}
    for completion in newer.outputs:
        before = unread.get(completion.index)
        unread[completion.index] = completion if before is None else _joined(before, completion)
    newer.outputs = [unread[index] for index in sorted(unread)]
    return newer


def _joined(older: CompletionOutput, newer: CompletionOutput) -> CompletionOutput:
    newer.text = older.text + newer.text
    if older.accepted_spans or newer.accepted_spans:
        shift = len(older.token_ids)
        newer.accepted_spans = [*older.accepted_spans, *((start + shift, n) for start, n in newer.accepted_spans)]
    older.token_ids += newer.token_ids
    newer.token_ids = older.token_ids
    if older.logprobs is not None and newer.logprobs is not None:
        older.logprobs += newer.logprobs
        newer.logprobs = older.logprobs
    return newer
