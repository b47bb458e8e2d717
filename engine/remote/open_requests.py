"""The requests of one client of an engine in another process, until they end."""

from __future__ import annotations

import asyncio

from dovetail.contracts.errors import RequestError, WorkerError
from dovetail.engine.input_processor import ProcessedInput
from dovetail.engine.output_processor import OutputProcessor
from dovetail.engine.output_stream import OutputReader, OutputStream
from dovetail.engine.remote.connection import Connection
from dovetail.engine.remote.messages import Abort, Accepted, Refused, Stop, Submit, Update, error_of


class OpenRequests:
    """Those that the engine has, and those that it has not answered. Used by one event loop."""

    def __init__(self, connection: Connection):
        """None yet, and no engine."""
        self.kv_usage = 0.0
        """Share of the KV blocks in use, 0 to 1, as the last step that concerned this client reported it."""
        self._connection = connection
        self._outputs = OutputProcessor(None)
        self._submitted: dict[str, tuple[ProcessedInput, OutputStream, asyncio.Future[None]]] = {}
        """By request id, what the engine has not answered yet."""
        self._streams: dict[str, OutputStream] = {}
        """By request id, of requests that the engine has."""

    @property
    def num_submitted(self) -> int:
        """Those that the engine has not answered yet."""
        return len(self._submitted)

    @property
    def are_any(self) -> bool:
        """Whether one is open."""
        return bool(self._submitted or self._streams)

    def engine_came(self, outputs: OutputProcessor) -> None:
        """Another engine, or the first. `outputs`: makes what clients get of what its steps bring."""
        self._outputs = outputs

    def check_new(self, request_id: str) -> None:
        """Raises `RequestError` for an id that is in use."""
        if request_id in self._streams or request_id in self._submitted:
            raise RequestError(f"request id {request_id!r} is in use")

    async def submit(self, message: Submit, processed: ProcessedInput) -> OutputReader:
        """The outputs of a request, once the engine has it. Raises what the engine raises, `RequestError` for a message
        that is no plain data."""
        try:
            self._connection.send(message)
        except (OverflowError, TypeError, RecursionError) as error:
            raise RequestError(
                f"the request cannot be sent to the engine: {error}; extra and processors hold plain data, with"
                " integers of 64 bits at most"
            ) from None
        loop = asyncio.get_running_loop()
        stream = OutputStream(message.request_id, loop)
        answered: asyncio.Future[None] = loop.create_future()
        self._submitted[message.request_id] = processed, stream, answered
        try:
            await answered
        except asyncio.CancelledError:
            self._abandon(stream)
            raise
        return OutputReader(stream, self._abandon)

    def take(self, message: Accepted | Refused | Update) -> None:
        """What the engine sent."""
        if isinstance(message, Update):
            self._update(message)
        elif isinstance(message, Accepted):
            self._accept(message)
        else:
            self._refuse(message)

    def give_up(self, error: RequestError) -> None:
        """Ends those that the engine has, there too. Those that it has not answered go on."""
        self._connection.send(Abort(self._fail_streams(error)))

    def fail_submitted(self, error: Exception) -> None:
        """Gives up those that the engine has not answered."""
        submitted, self._submitted = self._submitted, {}
        for _, _, answered in submitted.values():
            if not answered.done():
                answered.set_exception(error)

    def fail_all(self, error: WorkerError) -> None:
        """The engine is gone, or the client."""
        self.kv_usage = 0.0
        self._fail_streams(error)
        self.fail_submitted(error)

    def _update(self, message: Update) -> None:
        self.kv_usage = message.kv_usage
        outputs, stops = self._outputs.process(message.update)
        if stops:
            self._connection.send(Stop(stops))
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.push(output)
                if output.finished:
                    del self._streams[output.request_id]

    def _accept(self, message: Accepted) -> None:
        if message.request_id not in self._submitted:
            self._connection.send(Abort([message.request_id]))  # given up before the engine answered
            return
        processed, stream, answered = self._submitted.pop(message.request_id)
        self._outputs.add(
            message.request_id,
            processed,
            message.seq_ids,
            message.metrics,
            message.weight_version,
            message.weight_checksum,
        )
        self._streams[message.request_id] = stream
        if not answered.done():
            answered.set_result(None)

    def _refuse(self, message: Refused) -> None:
        error = error_of(message.failure)
        if message.request_id in self._submitted:
            _, _, answered = self._submitted.pop(message.request_id)
            if not answered.done():
                answered.set_exception(error)
        elif message.request_id in self._streams:
            self._outputs.drop(message.request_id)
            self._streams.pop(message.request_id).push(error)

    def _abandon(self, stream: OutputStream) -> None:
        """Nobody reads the stream any more: its request is aborted."""
        self._submitted.pop(stream.request_id, None)
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._outputs.drop(stream.request_id)
            if self._connection.up.is_set():
                self._connection.send(Abort([stream.request_id]))

    def _fail_streams(self, error: Exception) -> list[str]:
        """Ends the streams of requests that the engine has; returns the requests' ids."""
        self._outputs.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.push(error)
        return list(streams)
