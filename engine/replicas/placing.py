"""Requests find a replica, and another one where theirs fails before anything of them was read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from dovetail.contracts.errors import QueueFull, RequestError, WorkerError
from dovetail.contracts.router import RoutedRequest
from dovetail.engine.input_processor import ProcessedInput
from dovetail.engine.output_stream import OutputReader
from dovetail.engine.replicas.replica import Replica
from dovetail.engine.replicas.routing import Routing
from dovetail.engine.replicas.stream import RoutedStream

logger = logging.getLogger(__name__)


class PlacedRequest:
    """One request that has not ended."""

    def __init__(self, routed: RoutedRequest, processed: ProcessedInput, fields: dict[str, Any]):
        """`fields`: the other arguments of `RemoteEngine.submit_processed`."""
        self.routed = routed
        self.processed = processed
        self.fields = fields
        self.replica: int | None = None
        """The one that has it."""
        self.stream: RoutedStream | None = None
        """None until a replica has it."""


class Placing:
    """The requests of one client. A `Mover` of their streams."""

    def __init__(self, replicas: Sequence[Replica], routing: Routing, retries: int):
        """`retries`: times that a request goes to another replica."""
        self._replicas = replicas
        self._routing = routing
        self._retries = retries
        self._requests: dict[str, PlacedRequest] = {}
        """By request id."""

    def check_new(self, request_id: str) -> None:
        """Raises `RequestError` for an id that is in use."""
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use")

    async def place(self, placed: PlacedRequest) -> RoutedStream:
        """The stream of a request, once a replica has it. Raises `WorkerError` where none takes it, `QueueFull` where
        all that could refuse it for now."""
        request_id = placed.routed.request_id
        self.check_new(request_id)
        self._requests[request_id] = placed
        try:
            replica, stream = await self._ask_in_turn(placed)
        except BaseException:
            self.note_end(request_id)
            raise
        placed.stream = RoutedStream(request_id, replica, stream, self)
        return placed.stream

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        placed = self._requests.get(request_id)
        if placed is not None and placed.replica is not None:
            await self._replicas[placed.replica].engine.abort(request_id)

    def interrupt(self, replica: Replica, error: WorkerError) -> None:
        """The replica does not answer: requests of which nothing was read move."""
        for request_id in self._routing.requests_of(replica.index):
            stream = self._requests[request_id].stream
            if stream is not None and not stream.has_output and stream.num_moves < self._retries:
                stream.interrupt(error)

    # What `RoutedStream` asks.

    async def place_again(self, stream: RoutedStream, error: WorkerError) -> tuple[int, OutputReader]:
        """See `Mover.place_again`."""
        placed = self._requests[stream.request_id]
        if stream.num_moves >= self._retries:
            raise self.lost(stream, error) from error
        logger.warning(
            "request %s goes to another replica, since %s failed before its first output: %s",
            stream.request_id,
            self._replicas[stream.replica].name,
            error,
        )
        try:
            return await self._ask_in_turn(placed, {self._leave(placed)})
        except WorkerError as second:
            name = self._replicas[stream.replica].name
            raise WorkerError(
                f"{name} failed while it had request {stream.request_id}: {error}; then {second}"
            ) from second

    def note_output(self, request_id: str) -> None:
        """See `Mover.note_output`."""
        self._routing.prefilled(request_id)

    def note_end(self, request_id: str) -> None:
        """See `Mover.note_end`."""
        self._requests.pop(request_id, None)
        self._routing.finished(request_id)

    def lost(self, stream: RoutedStream, error: WorkerError) -> WorkerError:
        """See `Mover.lost`."""
        name = self._replicas[stream.replica].name
        if stream.has_output:
            why = "it had sent output already, so the request was not retried on another replica"
        else:
            why = f"it was retried {stream.num_moves} times before (server.retries)"
        return WorkerError(f"{name} failed while it had request {stream.request_id}: {error}; {why}")

    async def _ask_in_turn(self, placed: PlacedRequest, excluded: Collection[int] = ()) -> tuple[int, OutputReader]:
        """Asks replicas in the router's order until one has the request."""
        refused = set(excluded)
        full: QueueFull | None = None
        failures: list[str] = []
        while True:
            try:
                placed.replica = index = self._routing.place(placed.routed, refused)
            except WorkerError as error:
                # A replica that is full is no failure: its refusal says when to come again.
                raise full or WorkerError("; then ".join((*failures, str(error)))) from None
            replica = self._replicas[index]
            try:
                stream = await replica.engine.submit_processed(
                    placed.processed, placed.routed.request_id, **placed.fields
                )
            except QueueFull as error:
                full = error
                refused.add(self._leave(placed))
            except WorkerError as error:
                failures.append(f"{replica.name} failed while request {placed.routed.request_id} came: {error}")
                refused.add(self._leave(placed))
            else:
                return index, stream

    def _leave(self, placed: PlacedRequest) -> int:
        """The request is at no replica; which one had it."""
        index = placed.replica
        assert index is not None
        self._routing.finished(placed.routed.request_id)
        placed.replica = None
        return index
