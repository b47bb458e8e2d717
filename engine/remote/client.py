"""`RemoteEngine`: an engine in another process, as an `EngineClient` of this one. It never imports torch."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Self

from dovetail.contracts.engine_client import EngineFacts, RequestPlan, RequestReports
from dovetail.contracts.errors import QueueFull, RequestError, WorkerError
from dovetail.contracts.lora import LoadedLoRA, LoRARequest
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.pausing import PauseMode
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.prompts import ChatPrompt, Prompt
from dovetail.contracts.regions import RegionState, RegionStatus
from dovetail.contracts.router import CacheEvent
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.telemetry import Exposition
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.client_text import ClientText
from dovetail.engine.input_processor import InputProcessor, ProcessedInput
from dovetail.engine.kv.pool import PrefixCacheReset
from dovetail.engine.output_processor import OutputProcessor
from dovetail.engine.output_stream import OutputReader
from dovetail.engine.pooling.outputs import PoolingRequestOutput
from dovetail.engine.pooling.params import as_task, check_sampling
from dovetail.engine.remote.answer_watch import HEALTH_S, AnswerWatch
from dovetail.engine.remote.connection import Connection, EngineListener
from dovetail.engine.remote.messages import (
    Abort,
    Accepted,
    Ask,
    CacheChanges,
    Call,
    Ended,
    EngineOrigin,
    Explain,
    Explained,
    Message,
    Refused,
    Reply,
    Update,
    WeightChange,
    WeightsChanged,
    Welcome,
    cache_events,
    decode_to_client,
    submit_message,
)
from dovetail.engine.remote.open_requests import OpenRequests
from dovetail.engine.remote.pending_calls import PendingCalls
from dovetail.engine.remote.prefix_facts import PrefixFacts
from dovetail.engine.request_fields import check_order, check_request_id, check_salt, check_user
from dovetail.engine.tokenization.load import tokenizer_from_form

logger = logging.getLogger(__name__)


class RemoteEngine:
    """Requests from coroutines of one event loop to the engine at an address. Make one with `connect`."""

    def __init__(self, address: str, listener: EngineListener | None = None):
        self._connection = Connection(address)
        self._listener = listener
        self._ids = itertools.count()
        self._welcome: Welcome | None = None
        self._text: ClientText | None = None
        self._requests = OpenRequests(self._connection)
        self.weight_changes: list[WeightChange] = []
        """What led to the weights of the last engine whose weights had changed; empty where that is not known."""
        self.prefix: PrefixFacts | None = None
        """What the hashes of prompts' blocks follow from; None before `follow_cache`."""
        self._pages_digest: bytes | None = None
        """`PrefixFacts.pages_digest`, where this engine's weights have changed."""
        self._calls = PendingCalls(self._connection.send)
        self._follow: Callable[[list[CacheEvent]], None] = lambda events: None
        self._replies: asyncio.Task[None] | None = None
        self._answers = AnswerWatch(
            lambda: self._requests.are_any or self._calls.num_pending > 0,
            self.check_health,
            lambda: self.is_running,
            self._note_silence,
        )
        self._is_closed = False

    @classmethod
    def open(cls, address: str, listener: EngineListener | None = None) -> Self:
        """A client of the engines that serve at `address` ("ipc:///path"), now or later. `listener` hears of them."""
        client = cls(address, listener)
        client._connection.open(client._take_update, client._lost)
        client._replies = asyncio.create_task(client._read_replies())
        return client

    @classmethod
    async def connect(cls, address: str, timeout_s: float | None = None) -> Self:
        """As `open`, once an engine answers. Raises `WorkerError` where none does within `timeout_s` seconds."""
        client = cls.open(address)
        try:
            await asyncio.wait_for(client.wait_until_running(), timeout_s)
        except TimeoutError:
            await client.close()
            raise WorkerError(f"no engine answers at {address} within {timeout_s} seconds") from None
        return client

    @property
    def facts(self) -> EngineFacts:
        """See `EngineClient.facts`."""
        assert self._welcome is not None, "connect has not returned"
        return self._welcome.facts

    @property
    def origin(self) -> EngineOrigin:
        """What the engine's tokens follow from, and when it started."""
        assert self._welcome is not None, "connect has not returned"
        return self._welcome.origin

    @property
    def is_running(self) -> bool:
        """See `EngineClient.is_running`."""
        return self._connection.up.is_set() and not self._is_closed

    @property
    def is_known(self) -> bool:
        """Whether an engine answered once, so that there are facts and a tokenizer."""
        return self._welcome is not None

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, 0 to 1, as the last step that concerned this client reported it."""
        return self._requests.kv_usage

    async def wait_until_running(self) -> None:
        """Returns once there is an engine."""
        await self._connection.up.wait()

    async def wait_until_down(self) -> None:
        """Returns once there is none."""
        await self._connection.down.wait()

    async def wait_until_settled(self) -> None:
        """Returns once an engine answered, or nothing listened at the address."""
        await self._connection.settled.wait()

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> OutputReader:
        """See `EngineClient.submit`."""
        self._check_queue()
        processed = await self.process(prompt, sampling_params)
        return await self.submit_processed(
            replace(processed, lora_request=lora_request),
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            trace_headers=trace_headers,
            user=user,
        )

    async def process(
        self, prompt: Prompt, sampling_params: SamplingParams | PoolingParams | None = None
    ) -> ProcessedInput:
        """The request as engines take it: tokenized and checked. Raises `RequestError` for one that is refused."""
        return await self._running().process(prompt, sampling_params)

    async def submit_processed(
        self,
        processed: ProcessedInput,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> OutputReader:
        """As `submit`, of what `process` returned."""
        self._running()
        request_id = request_id if request_id is not None else f"{self._connection.client_name}-{next(self._ids)}"
        check_request_id(request_id)
        self._requests.check_new(request_id)
        arrival = time.monotonic()
        check_order(priority, arrival)
        check_salt(cache_salt)
        check_user(user)
        self._check_queue()
        message = submit_message(
            request_id,
            processed,
            priority=priority,
            cache_salt=cache_salt,
            arrival_time=arrival,
            trace_headers=trace_headers,
            user=user,
        )
        self._answers.start()
        return await self._requests.submit(message, processed)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """As `AsyncLLMEngine.generate`."""
        check_sampling(sampling_params)
        stream = await self.submit(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            trace_headers=trace_headers,
            user=user,
            lora_request=lora_request,
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[PoolingRequestOutput]:
        """As `AsyncLLMEngine.encode`."""
        stream = await self.submit(
            prompt,
            as_task(pooling_params, 1, None)[0],
            request_id,
            priority=priority,
            cache_salt=cache_salt,
            trace_headers=trace_headers,
            lora_request=lora_request,
        )
        try:
            async for output in stream:
                yield PoolingRequestOutput.from_request(output)
        finally:
            stream.close()

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        self._running()
        self._connection.send(Abort([request_id]))

    async def plan_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestPlan:
        """See `EngineClient.plan_request`."""
        return await self._running().plan(prompt, sampling_params)

    async def explain_request(self, request_id: str) -> RequestReports:
        """See `EngineClient.explain_request`."""
        check_request_id(request_id)
        reports: RequestReports = await self._ask(lambda call_id: Explain(call_id, request_id))
        return reports

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `EngineClient.tokenize`."""
        return await self._known_text().tokenize(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `EngineClient.detokenize`."""
        return await self._known_text().detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def pair_prompt(self, first: Prompt, second: Prompt, *, truncate_prompt_tokens: int | None = None) -> Prompt:
        """See `EngineClient.pair_prompt`."""
        return await self._known_text().pair_prompt(first, second, truncate_prompt_tokens=truncate_prompt_tokens)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatPrompt:
        """See `EngineClient.render_chat`."""
        return await self._known_text().render_chat(messages, **options)

    def token_texts(self, token_ids: Iterable[int]) -> list[str]:
        """See `EngineClient.token_texts`."""
        return self._known_text().token_texts(token_ids)

    async def metrics(self) -> Exposition:
        """See `EngineClient.metrics`."""
        content_type, body = await self._ask(lambda call_id: Ask(call_id, "metrics"))
        return Exposition(content_type=content_type, body=body)

    async def add_lora(self, request: LoRARequest) -> LoadedLoRA:
        """See `EngineClient.add_lora`."""
        return LoadedLoRA(**await self.call("start_lora", request=asdict(request)))

    async def remove_lora(self, adapter: str | int) -> None:
        """See `EngineClient.remove_lora`."""
        await self.call("remove_lora", adapter=adapter)

    async def list_loras(self) -> list[LoadedLoRA]:
        """See `EngineClient.list_loras`."""
        return [LoadedLoRA(**plain) for plain in await self.call("list_loras")]

    async def pin_lora(self, adapter: str | int) -> None:
        """See `EngineClient.pin_lora`."""
        await self.call("pin_lora", adapter=adapter)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """See `EngineClient.pause`."""
        await self.call("pause", mode=mode)

    async def resume(self) -> None:
        """See `EngineClient.resume`."""
        await self.call("resume")

    async def is_paused(self) -> bool:
        """See `EngineClient.is_paused`."""
        return bool(await self.call("is_paused"))

    async def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> int:
        """See `EngineClient.sleep`."""
        return int(await self.call("sleep", level=level, tags=tags))

    async def wake_up(
        self, tags: Collection[str] | None = None, *, new_weights: bool = False, for_update: bool = False
    ) -> None:
        """See `EngineClient.wake_up`."""
        await self.call("wake_up", tags=tags, new_weights=new_weights, for_update=for_update)

    async def regions(self) -> tuple[RegionStatus, ...]:
        """See `EngineClient.regions`."""
        answer = await self.call("regions")
        return tuple(RegionStatus(**{**plain, "state": RegionState(plain["state"])}) for plain in answer)

    async def is_sleeping(self) -> bool:
        """See `EngineClient.is_sleeping`."""
        return bool(await self.call("is_sleeping"))

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | None = None) -> None:
        """See `EngineClient.init_weight_transfer_engine`."""
        await self.call("init_weight_transfer_engine", init_info=init_info)

    async def start_weight_update(
        self, is_checkpoint_format: bool = True, *, weight_version: int | None = None, partial: bool = False
    ) -> int:
        """See `EngineClient.start_weight_update`."""
        options = {"is_checkpoint_format": is_checkpoint_format, "weight_version": weight_version, "partial": partial}
        return int(await self.call("start_weight_update", **options))

    async def update_weights(self, update_info: Mapping[str, Any], *, drafter: str | None = None) -> None:
        """See `EngineClient.update_weights`."""
        await self.call("update_weights", update_info=update_info, drafter=drafter)

    async def finish_weight_update(self) -> WeightsReport:
        """See `EngineClient.finish_weight_update`."""
        return WeightsReport(**await self.call("finish_weight_update"))

    async def abort_weight_update(self) -> None:
        """See `EngineClient.abort_weight_update`."""
        await self.call("abort_weight_update")

    async def weights(self) -> WeightsReport:
        """See `EngineClient.weights`."""
        return WeightsReport(**await self.call("weights"))

    async def repeat_weight_change(self, change: WeightChange) -> WeightsReport:
        """Changes the weights as those of another engine were changed; returns those that the engine has then."""
        return WeightsReport(**await self.call("repeat_weight_change", change=change))

    async def follow_cache(self, follow: Callable[[list[CacheEvent]], None]) -> PrefixFacts:
        """Has `follow` called with what changes in the engine's prefix cache, hashes alone: first with all that it has,
        behind `AllBlocksCleared`, and before the outputs of the step that changed it. Ends with the engine: ask the
        next one again."""
        self._follow = follow
        facts = PrefixFacts.of(await self.call("follow_cache"))
        # A change that was reported is never older than the answer, which was on its way meanwhile.
        self.prefix = facts if self._pages_digest is None else replace(facts, pages_digest=self._pages_digest)
        return self.prefix

    async def check_health(self) -> None:
        """See `EngineClient.check_health`."""
        await self._ask(lambda call_id: Ask(call_id, "health"))

    async def reset_prefix_cache(self) -> PrefixCacheReset:
        """Forgets cached prefixes; how many blocks were dropped, and how many stay while requests use them."""
        return PrefixCacheReset(**await self.call("reset_prefix_cache"))

    async def call(self, name: str, **arguments: Any) -> Any:
        """What the call `name` of `EngineServer` returns, as plain data; it runs between two steps of the engine."""
        self._running()
        self._answers.start()
        return await self._calls.answer(lambda call_id: Call(call_id, name, arguments))

    async def close(self) -> None:
        """Ends the client; requests that are open are aborted by the engine. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._answers.close()
        await self._connection.stop_reading()
        if self._replies is not None:
            self._replies.cancel()
            await asyncio.gather(self._replies, return_exceptions=True)
        self._fail_all(WorkerError("the client of the engine is closed"))
        if self._text is not None:
            self._text.close()
        self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _running(self) -> ClientText:
        if self._is_closed:
            raise WorkerError("the client of the engine is closed")
        self._connection.check_up()
        return self._known_text()

    def _check_queue(self) -> None:
        """Raises for a request that the engine would not answer soon: what is sent to it is kept until it does."""
        assert self._welcome is not None
        if self._answers.is_stuck:
            raise WorkerError(f"the engine has not answered for {HEALTH_S:g} seconds")
        limit = self._welcome.max_num_waiting
        if limit is not None and self._requests.num_submitted >= limit:
            raise QueueFull(
                f"{limit} requests wait for the engine's answer already (server.max_num_waiting): send this one again"
                " later",
                retry_after_s=HEALTH_S,
            )

    def _known_text(self) -> ClientText:
        assert self._text is not None, "connect has not returned"
        return self._text

    async def _ask(self, question: Callable[[int], Message]) -> Any:
        """The answer to what the engine answers at once."""
        self._running()
        try:
            return await asyncio.wait_for(self._calls.answer(question), HEALTH_S)
        except TimeoutError:
            raise WorkerError(f"the engine has not answered for {HEALTH_S:g} seconds") from None

    def _note_silence(self, error: WorkerError | None) -> None:
        """The engine does not answer: requests that wait for its answer are given up. None: it answers again."""
        if error is not None:
            self._requests.fail_submitted(error)
        if self._listener is not None:
            self._listener.engine_silent(error)

    def _lost(self) -> None:
        self._answers.note_end()
        self._fail_all(self._connection.loss())
        if self._listener is not None:
            self._listener.engine_lost()

    async def _read_replies(self) -> None:
        while True:
            message = decode_to_client(await self._connection.reply())
            if isinstance(message, Welcome):
                await self._meet(message)
            elif isinstance(message, Reply):
                self._calls.resolve(message.call_id, message.value, message.failure)
            elif isinstance(message, Explained):
                self._calls.resolve(message.call_id, message.reports, message.failure)
            elif isinstance(message, WeightsChanged):
                self.weight_changes = [*self.weight_changes[: message.num_before], *message.changes]
                self._pages_digest = bytes.fromhex(message.pages)
                if self.prefix is not None:
                    self.prefix = replace(self.prefix, pages_digest=self._pages_digest)
                if self._listener is not None:
                    self._listener.engine_updated()
            elif isinstance(message, Ended):
                self._connection.note_end(message.failure.message)

    async def _meet(self, welcome: Welcome) -> None:
        """Another engine, or the first."""
        form, events = welcome.tokenizer, self._connection.num_events
        # Building a large vocabulary takes a while, and streams of other engines may run on this loop.
        tokenizer = await asyncio.to_thread(tokenizer_from_form, form) if form is not None else None
        if events != self._connection.num_events:
            return  # that engine is gone meanwhile; the next one sends its own
        self._welcome, self._pages_digest = welcome, None
        previous, self._text = self._text, ClientText(InputProcessor(welcome.facts, tokenizer), tokenizer)
        if previous is not None:
            previous.close()
        self._requests.engine_came(OutputProcessor(tokenizer, welcome.facts.kv_transfer_params))
        self._connection.note_up()
        if self._listener is not None:
            self._listener.engine_came()

    def _take_update(self, data: bytes) -> None:
        try:
            message = decode_to_client(data)
            if isinstance(message, CacheChanges):
                self._follow(cache_events(message))
            elif isinstance(message, Accepted | Refused | Update):
                self._requests.take(message)
        except Exception as error:
            # What an update would have changed is unknown now: none of these requests can go on.
            logger.exception("the client of the engine failed")
            self._requests.give_up(RequestError(f"the client of the engine failed: {error!r}; its log says where"))

    def _fail_all(self, error: WorkerError) -> None:
        """Ends everything that waits for the engine."""
        self._requests.fail_all(error)
        self._calls.fail(error)
