"""The outputs of a request that may move to another replica."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from dovetail.contracts.errors import WorkerError
from dovetail.contracts.outputs import RequestOutput
from dovetail.engine.output_stream import OutputReader


class Mover(Protocol):
    """Who places requests."""

    async def place_again(self, stream: RoutedStream, error: WorkerError) -> tuple[int, OutputReader]:
        """Another replica for a request of which nothing was read, and its stream there. Raises `WorkerError`."""

    def note_output(self, request_id: str) -> None:
        """The first output came."""

    def note_end(self, request_id: str) -> None:
        """The request is at no replica any more."""

    def lost(self, stream: RoutedStream, error: WorkerError) -> WorkerError:
        """What the reader of a request that cannot move is given."""


class RoutedStream:
    """A `RequestStream` over replicas. A request whose replica dies before its first output goes to another one; the
    reader does not notice."""

    def __init__(self, request_id: str, replica: int, stream: OutputReader, mover: Mover):
        self.request_id = request_id
        self.replica = replica
        """The one that has the request."""
        self.num_moves = 0
        """How often it went to another one."""
        self._stream = stream
        self._mover = mover
        self._has_output = False
        self._is_over = False

    @property
    def has_output(self) -> bool:
        """Whether something of the request was read: from then on it cannot move."""
        return self._has_output

    def interrupt(self, error: WorkerError) -> None:
        """Has the request move where nothing of it was read: its replica does not answer."""
        if not self._has_output and not self._is_over:
            self._stream.fail(error)

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self._outputs()

    async def _outputs(self) -> AsyncIterator[RequestOutput]:
        try:
            while not self._is_over:
                try:
                    async for output in self._stream:
                        self._note(output)
                        yield output
                    return
                except WorkerError as error:
                    if self._has_output:
                        raise self._mover.lost(self, error) from error
                    self.replica, self._stream = await self._mover.place_again(self, error)
                    self.num_moves += 1
        finally:
            self.close()

    def _note(self, output: RequestOutput) -> None:
        if not self._has_output:
            self._has_output = True
            self._mover.note_output(self.request_id)
        if output.finished:
            self._end()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._mover.note_end(self.request_id)

    def close(self) -> None:
        """Aborts the request, unless it has ended. Idempotent."""
        self._end()
        self._stream.close()
