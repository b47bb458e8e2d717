"""The streams of one request with several prompts: all submitted before the response starts, and read together."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from starlette.requests import Request

from dovetail.contracts.engine_client import EngineClient, RequestStream
from dovetail.contracts.errors import GrammarError, QueueFull, RequestError
from dovetail.contracts.lora import AdapterConflict, AdapterNotFound, LoRARequest
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.pausing import EngineConflict
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.prompts import Prompt
from dovetail.contracts.route import APIError
from dovetail.contracts.sampling import SamplingParams
from dovetail.plugins.server.request_ids import name_request
from dovetail.plugins.server.sampling import SamplingFields, with_param

_TRACE_HEADERS = ("traceparent", "tracestate")
_UNIQUE_AND_INDEX = re.compile(r"-[0-9a-f]{16}-[0-9]+")
"""What stands behind a response's id in the ids of its requests."""
_WITH_STATUS = (QueueFull, AdapterNotFound, AdapterConflict, EngineConflict)
"""Refusals whose status is not 400; see `as_api_error`."""


@dataclass(frozen=True)
class FormOrigin:
    """What in a body asks for the form of the output, where something does."""

    field: str
    whose: str = ""
    """For messages: "tool 'book'"; empty where the field says it."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """How the prompts of one request are submitted."""

    response_id: str
    """What the client sees: its own id, where it gave one."""
    unique: str
    """Tells requests of the same id apart."""
    params: SamplingParams
    options: Mapping[str, Any]
    """Keyword arguments of `EngineClient.submit`."""
    form: FormOrigin


@dataclass(frozen=True, kw_only=True)
class PooledSubmission:
    """How the prompts of a request that generates nothing are submitted."""

    form: ClassVar[FormOrigin] = FormOrigin("input")
    """Nothing asks for the form of an output."""
    response_id: str
    """As in `Submission`."""
    unique: str
    params: PoolingParams
    options: Mapping[str, Any]


class SubmittedFields(Protocol):
    """What a body says of how its prompts are submitted, `SamplingFields` among others."""

    request_id: str | None
    priority: int | None
    cache_salt: str | None

    def end_user(self) -> str | None:
        """For whom the request is, where it says so."""


def submission(
    request: Request,
    fields: SamplingFields,
    params: SamplingParams,
    *,
    prefix: str,
    form: FormOrigin,
    lora_request: LoRARequest | None = None,
) -> Submission:
    """How a request is submitted. Its id is the client's own (`request_id`, or the header x-request-id) behind
    `prefix`, or random. `lora_request`: of `RouteHost.find_model`. Raises `APIError` 400 for an id that no header can
    show."""
    return Submission(
        response_id=f"{prefix}-{name_request(request, fields.request_id)}",
        unique=secrets.token_hex(8),
        params=params,
        options=_options(request, fields, lora_request),
        form=form,
    )


def pooled_submission(
    request: Request,
    fields: SubmittedFields,
    params: PoolingParams,
    *,
    prefix: str,
    lora_request: LoRARequest | None = None,
) -> PooledSubmission:
    """As `submission`, of a request that generates nothing."""
    return PooledSubmission(
        response_id=f"{prefix}-{name_request(request, fields.request_id)}",
        unique=secrets.token_hex(8),
        params=params,
        options=_options(request, fields, lora_request),
    )


def _options(request: Request, fields: SubmittedFields, lora_request: LoRARequest | None) -> dict[str, Any]:
    """Keyword arguments of `EngineClient.submit`."""
    options: dict[str, Any] = {"priority": fields.priority or 0, "cache_salt": fields.cache_salt}
    user = fields.end_user()
    if user is not None:
        options["user"] = user
    if lora_request is not None:
        options["lora_request"] = lora_request
    trace = {name: request.headers[name] for name in _TRACE_HEADERS if name in request.headers}
    if trace:
        options["trace_headers"] = trace
    return options


def is_of_response(request_id: str, response_id: str) -> bool:
    """Whether a request of the engine is that of a prompt of a response."""
    is_longer = request_id.startswith(response_id)
    return is_longer and _UNIQUE_AND_INDEX.fullmatch(request_id, len(response_id)) is not None


class Streams:
    """The streams of a request's prompts, to be used in `async with`: leaving it closes them.

    `async with Streams(engine, prompts, submission) as streams` submits. Raises `APIError` 400 where one prompt is
    refused, or what `submit` raises that has a status of its own; the others are closed.
    """

    def __init__(
        self, engine: EngineClient, prompts: Sequence[Prompt], how: Submission | PooledSubmission, first_index: int = 0
    ):
        """`first_index`: of `prompts[0]` among all that the submission has, for their requests' ids."""
        self._first_index = first_index
        self._engine = engine
        self._prompts = prompts
        self._how = how
        self._streams: list[RequestStream] = []

    async def __aenter__(self) -> Self:
        try:
            if len(self._prompts) == 1:
                self._streams = [await self._submit(0)]
            else:
                self._streams = await self._submit_all()
        except RequestError as error:
            if not isinstance(error, _WITH_STATUS) and self._engine.is_running:
                refused = with_param(error)
                param = self._how.form.field if refused.param == "structured_outputs" else refused.param
                raise APIError(400, str(error), param=param) from None
            raise
        return self

    async def _submit_all(self) -> list[RequestStream]:
        # At once: the engine answers between two steps, and would do so for one after the other.
        waiting = [asyncio.create_task(self._submit(index)) for index in range(len(self._prompts))]
        try:
            return await asyncio.gather(*waiting)
        except BaseException:
            await _close_all(waiting)
            raise

    async def _submit(self, index: int) -> RequestStream:
        request_id = f"{self._how.response_id}-{self._how.unique}-{self._first_index + index}"
        return await self._engine.submit(self._prompts[index], self._how.params, request_id, **self._how.options)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        for stream in self._streams:
            stream.close()

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all prompts as they come, each with its prompt's index. Raises `APIError` 500 for a request that
        was accepted and failed, `WorkerError` where the engine died."""
        try:
            if len(self._streams) == 1:
                async for output in self._streams[0]:
                    yield 0, output
            else:
                async for item in _together(self._streams):
                    yield item
        except GrammarError as error:
            form = self._how.form
            raise APIError(400, f"{form.whose}: {error}" if form.whose else str(error), param=form.field) from error
        except RequestError as error:
            if not self._engine.is_running:
                raise
            raise APIError(500, str(error)) from error

    async def last(self) -> list[RequestOutput]:
        """The last output of each prompt."""
        found: dict[int, RequestOutput] = {}
        async for index, output in self.outputs():
            found[index] = output
        return [found[index] for index in range(len(self._streams))]


async def _close_all(waiting: Sequence[asyncio.Task[RequestStream]]) -> None:
    """Closes the streams of those that were accepted, and waits for nobody else."""
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for task in waiting:
        if not task.cancelled() and task.exception() is None:
            task.result().close()


async def _together(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several streams. One that is not taken waits, so that later ones of its stream are merged."""
    queue: asyncio.Queue[tuple[int, RequestOutput | Exception]] = asyncio.Queue(1)

    async def read(index: int, stream: RequestStream) -> None:
        try:
            async for output in stream:
                await queue.put((index, output))
        except Exception as error:
            await queue.put((index, error))

    readers = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(readers)
    try:
        while num_open:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item.finished
            yield index, item
    finally:
        for reader in readers:
            reader.cancel()
