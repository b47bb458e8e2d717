"""What travels between an engine's process and its clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import msgspec

from dovetail.contracts.engine_client import EngineFacts, RequestReports
from dovetail.contracts.errors import (
    CapacityError,
    ConfigError,
    DovetailError,
    ModelError,
    PluginError,
    QueueFull,
    RequestError,
    WorkerError,
)
from dovetail.contracts.grammar_spec import OutputGrammar
from dovetail.contracts.lora import AdapterConflict, AdapterNotFound, LoRARequest
from dovetail.contracts.outputs import RequestMetrics
from dovetail.contracts.pausing import EngineConflict
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.router import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.weight_transport import WeightsReport, WeightUpdateConflict
from dovetail.engine.input_processor import ProcessedInput
from dovetail.engine.step_update import StepUpdate, TextStop
from dovetail.engine.tokenization.form import TokenizerForm


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages: an array with the class's name in front."""


# From clients, to the ROUTER socket.


class Hello(Message):
    """A client is there: updates go to its address."""

    address: str


class Submit(Message):
    """A request. Answered by `Accepted` or `Refused`, in order with the updates."""

    request_id: str
    token_ids: list[int]
    params: dict[str, Any]
    max_total_tokens: int
    eos_token_ids: list[int]
    bad_word_ids: list[list[int]]
    drafter: str | None
    grammar: OutputGrammar | None
    cache_salt: str | None
    priority: int
    arrival_time: float
    """time.monotonic(), which all processes of a machine share."""
    trace_headers: dict[str, str] | None
    user: str | None
    prediction: tuple[int, ...]
    """As in `ProcessedInput`."""
    lora_request: LoRARequest | None
    pooling: PoolingParams | None
    needs_every_state: bool
    token_types: tuple[int, ...]


class Stop(Message):
    """Stop strings ended these sequences."""

    stops: list[TextStop]


class Abort(Message):
    """These requests are to end."""

    request_ids: list[str]


class Call(Message):
    """Something to do between two steps; answered by `Reply`."""

    call_id: int
    name: str
    arguments: dict[str, Any]


class Ask(Message):
    """A question that is answered at once, during a step too; answered by `Reply`. Names: "metrics", "health"."""

    call_id: int
    name: str


class Explain(Message):
    """What is known of a request (`EngineClient.explain_request`)? Answered at once, by `Explained`."""

    call_id: int
    request_id: str


# To clients: `Welcome`, `Reply`, `Explained`, `WeightsChanged` and `Ended` from the ROUTER socket, the others from the
# client's PUSH socket.


class EngineOrigin(msgspec.Struct, array_like=True):
    """Where the tokens of an engine come from."""

    identity: dict[str, str]
    """What its tokens follow from besides its facts and updates of its weights, by what it is called in messages."""
    started: float
    """time.monotonic(), which all processes of a machine share."""


class Welcome(Message):
    """The answer to `Hello`."""

    engine_id: str
    """Another one after each start of the engine."""
    facts: EngineFacts
    tokenizer: TokenizerForm | None
    max_num_waiting: int | None
    """Requests of one client that the engine has not answered; None: any number."""
    origin: EngineOrigin


class Failure(msgspec.Struct, array_like=True):
    """An error."""

    kind: str
    """Name of its class."""
    message: str
    retry_after_s: float = 0.0


class Reply(Message):
    """The answer to `Call` or `Ask`."""

    call_id: int
    value: Any
    failure: Failure | None


class Explained(Message):
    """The answer to `Explain`."""

    call_id: int
    reports: RequestReports | None
    failure: Failure | None


class Accepted(Message):
    """The engine has the request."""

    request_id: str
    seq_ids: list[int]
    metrics: RequestMetrics
    weight_version: int
    weight_checksum: str


class Refused(Message):
    """The engine does not take the request, or it ended without a last update."""

    request_id: str
    failure: Failure


class Update(Message):
    """What steps brought the client's requests."""

    update: StepUpdate
    kv_usage: float = 0.0
    """Share of the KV blocks that requests hold, 0 to 1."""


class WeightChange(msgspec.Struct, array_like=True):
    """What replaced weights of an engine: an update, or the checkpoint as it was then."""

    report: WeightsReport
    """The weights that the engine had afterwards."""
    is_partial: bool = False
    buckets: list[tuple[dict[str, Any], str | None]] = []
    """Of an update: `update_info` and the drafter's label of each."""
    reads_checkpoint: bool = False
    """The checkpoint was read again, behind a sleep that discarded the weights."""


class WeightsChanged(Message):
    """The weights of the engine are others than those that it started with; once for a client that comes, and again
    after each change, before the answer to the call that made it."""

    num_before: int
    """So many of the changes that the client knows still lead to the weights, the first ones."""
    changes: list[WeightChange]
    """Those that follow. Empty, with `num_before` 0: how to get there is not known."""
    pages: str
    """What KV pages follow from now: `PagesIdentity.digest`, in hexadecimal."""


class Ended(Message):
    """The engine ends, and why: the last message of its ROUTER socket. One that was killed does not send it."""

    failure: Failure


class Stored(msgspec.Struct, array_like=True, tag=True):
    """`BlocksStored`, hashes alone."""

    block_hashes: list[bytes]
    parent_hash: bytes | None
    adapter: str | None


class Removed(msgspec.Struct, array_like=True, tag=True):
    """`BlocksRemoved`."""

    block_hashes: list[bytes]


class Cleared(msgspec.Struct, array_like=True, tag=True):
    """`AllBlocksCleared`."""


class CacheChanges(Message):
    """What changed in the prefix cache, for clients that follow it, before the outputs of the step that changed it. The
    first is what the cache has, behind a `Cleared`; so is one that follows messages which the client did not take."""

    block_size: int
    changes: list[Stored | Removed | Cleared]


ToEngine = Hello | Submit | Stop | Abort | Call | Ask | Explain
ToClient = Welcome | Reply | Explained | Accepted | Refused | Update | CacheChanges | WeightsChanged | Ended

_ERRORS: dict[str, type[DovetailError]] = {
    cls.__name__: cls
    for cls in (
        ConfigError,
        PluginError,
        ModelError,
        RequestError,
        EngineConflict,
        WeightUpdateConflict,
        AdapterNotFound,
        AdapterConflict,
        CapacityError,
        WorkerError,
    )
}


def failure_of(error: BaseException) -> Failure:
    """The error as it travels."""
    retry_after_s = error.retry_after_s if isinstance(error, QueueFull) else 0.0
    return Failure(type(error).__name__, str(error) or type(error).__name__, retry_after_s)


def error_of(failure: Failure) -> DovetailError:
    """The error as it is raised in the client: of the same class where that is one of Dovetail's."""
    if failure.kind == QueueFull.__name__:
        return QueueFull(failure.message, retry_after_s=failure.retry_after_s)
    cls = _ERRORS.get(failure.kind)
    return cls(failure.message) if cls is not None else PluginError(f"{failure.kind}: {failure.message}")


_MASK_64 = (1 << 64) - 1
_DEFAULTS = SamplingParams()


def params_to_plain(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not the default, as plain data. The form of the output is left out: it travels as
    `OutputGrammar`. Of the seed, the 64 bits that draws depend on."""
    plain = {}
    for each in fields(SamplingParams):
        if each.name == "structured_outputs":
            continue
        value = getattr(params, each.name)
        if value != getattr(_DEFAULTS, each.name):
            plain[each.name] = dict(value) if isinstance(value, Mapping) else value
    if params.seed is not None:
        plain["seed"] = params.seed & _MASK_64
    return plain


def cache_changes(events: Iterable[CacheEvent], block_size: int) -> CacheChanges:
    """The message of events."""
    changes: list[Stored | Removed | Cleared] = []
    for event in events:
        if isinstance(event, BlocksStored):
            changes.append(Stored(list(event.block_hashes), event.parent_hash, event.adapter))
        elif isinstance(event, BlocksRemoved):
            changes.append(Removed(list(event.block_hashes)))
        else:
            changes.append(Cleared())
    return CacheChanges(block_size, changes)


def cache_events(message: CacheChanges) -> list[CacheEvent]:
    """The events of a message."""
    events: list[CacheEvent] = []
    for change in message.changes:
        if isinstance(change, Stored):
            events.append(
                BlocksStored(
                    block_hashes=tuple(change.block_hashes),
                    parent_hash=change.parent_hash,
                    token_ids=(),
                    block_size=message.block_size,
                    adapter=change.adapter,
                )
            )
        elif isinstance(change, Removed):
            events.append(BlocksRemoved(block_hashes=tuple(change.block_hashes)))
        else:
            events.append(AllBlocksCleared())
    return events


def params_from_plain(plain: Mapping[str, Any]) -> SamplingParams:
    """Raises `RequestError` as `SamplingParams` does."""
    return SamplingParams(**plain)


def submit_message(
    request_id: str,
    processed: ProcessedInput,
    *,
    priority: int,
    cache_salt: str | None,
    arrival_time: float,
    trace_headers: Mapping[str, str] | None,
    user: str | None,
) -> Submit:
    """The message that asks for a request."""
    return Submit(
        request_id=request_id,
        token_ids=processed.token_ids,
        params=params_to_plain(processed.params),
        max_total_tokens=processed.max_total_tokens,
        eos_token_ids=list(processed.eos_token_ids),
        bad_word_ids=[list(ids) for ids in processed.bad_word_ids],
        drafter=processed.drafter,
        grammar=processed.grammar,
        cache_salt=processed.cache_salt if processed.cache_salt is not None else cache_salt,
        priority=priority,
        arrival_time=arrival_time,
        trace_headers=dict(trace_headers) if trace_headers is not None else None,
        user=user,
        prediction=processed.prediction,
        lora_request=processed.lora_request,
        pooling=processed.pooling,
        needs_every_state=processed.needs_every_state,
        token_types=processed.token_types,
    )


def processed_input(message: Submit) -> ProcessedInput:
    """The request of a message, without its text, which stays with the client."""
    params = params_from_plain(message.params)
    eos = tuple(message.eos_token_ids)
    return ProcessedInput(
        prompt=None,
        token_ids=message.token_ids,
        params=params,
        max_total_tokens=message.max_total_tokens,
        eos_token_ids=eos,
        stop_ids=frozenset(eos) | frozenset(params.stop_token_ids),
        bad_word_ids=tuple(tuple(ids) for ids in message.bad_word_ids),
        drafter=message.drafter,
        cache_salt=message.cache_salt,
        shows_logprobs=params.logprobs is not None,
        grammar=message.grammar,
        prediction=message.prediction,
        lora_request=message.lora_request,
        pooling=message.pooling,
        needs_every_state=message.needs_every_state,
        token_types=message.token_types,
    )


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
"""Bytes of a message."""
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
"""A message from a client. Raises `msgspec.DecodeError`."""
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
"""A message from the engine. Raises `msgspec.DecodeError`."""
