"""`AsyncLLMEngine`: the engine for asyncio. The step loop runs in a thread of its own; the event loop only hands
requests in and outputs out."""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from dovetail.config.layers import LayeredConfig
from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.engine_client import EngineFacts, RequestPlan, RequestReports
from dovetail.contracts.lora import LoadedLoRA, LoRARequest
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.pausing import PauseMode
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.prompts import ChatPrompt, Prompt
from dovetail.contracts.regions import RegionStatus
from dovetail.contracts.router import CacheEvent
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.telemetry import Exposition
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.engine import LLMEngine
from dovetail.engine.kv.manager import KVStatistics
from dovetail.engine.kv.pool import PrefixCacheReset
from dovetail.engine.kv_events import KVListener
from dovetail.engine.output_stream import OutputReader, OutputStream
from dovetail.engine.pooling.outputs import PoolingRequestOutput
from dovetail.engine.pooling.params import as_task, check_sampling
from dovetail.engine.request_fields import check_request_id
from dovetail.engine.step_thread import StepThread
from dovetail.engine.token_engine import KEPT_REQUESTS, SHUTDOWN_S
from dovetail.engine.tokenization.tokenizer import Tokenizer


class AsyncLLMEngine:
    """Requests from coroutines, batched together.

    `generate` may be called from any event loop and any number of times at once. Closing (or cancelling) a stream
    aborts its request. Use as a context manager, or call `shutdown`; an engine that is dropped ends after the step that
    runs. Outputs that were not read yet are merged: deltas into one, and of cumulative outputs the last is kept.
    """

    def __init__(self, engine: LLMEngine, *, kept_requests: int = KEPT_REQUESTS):
        """`kept_requests`: so many requests `explain_request` knows after their end."""
        self._engine = engine
        engine.keep_ended(kept_requests)
        self._ids = itertools.count()
        self._text = engine.create_client_text()
        self._steps = StepThread(engine)
        weakref.finalize(self, self._steps.stop).atexit = False  # the thread looks after that itself

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
    def facts(self) -> EngineFacts:
        """See `EngineClient.facts`."""
        return self._engine.facts

    @property
    def devices(self) -> tuple[str, ...]:
        """See `TokenEngine.devices`."""
        return self._engine.devices

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None with tokenizer_mode none."""
        return self._engine.tokenizer

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted: not shut down, and no worker died."""
        return self._steps.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine ended by an error, rather than by `shutdown`."""
        return self._steps.errored

    async def check_health(self) -> None:
        """Raises what ended the engine, or `RequestError` after `shutdown`; otherwise returns.

        It asks no worker, so it returns while one hangs: `executor.step_timeout_s` ends an engine whose worker does.
        """
        self._steps.check_running()

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
        """Yields outputs as they come; the last one has `finished` set. `trace_headers`, `user` and
        `lora_request`: see `LLMEngine.add_request`.

        Raises `RequestError` for a request that is refused or that failed, `WorkerError` when the engine died.
        Leaving the loop early, or cancelling the task, aborts the request and frees its memory.
        """
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
        """Yields one output: what is pooled from the prompt's hidden states. Otherwise as `generate`."""
        params = as_task(pooling_params, 1, None)[0]
        stream = await self.submit(
            prompt,
            params,
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
        self._steps.check_running()
        loop = asyncio.get_running_loop()
        request_id = request_id if request_id is not None else f"async-{next(self._ids)}"
        check_request_id(request_id)
        arrival = time.monotonic()
        processed = await self._text.process(prompt, sampling_params)
        stream = OutputStream(request_id, loop)
        processed = replace(processed, lora_request=lora_request)
        add = partial(self._engine.add_request, request_id, processed, priority=priority, trace_headers=trace_headers)
        await self._steps.open_stream(stream, partial(add, arrival_time=arrival, cache_salt=cache_salt, user=user))
        return OutputReader(stream, self._steps.close_stream)

    async def plan_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestPlan:
        """See `EngineClient.plan_request`."""
        self._steps.check_running()
        return await self._text.plan(prompt, sampling_params)

    async def explain_request(self, request_id: str) -> RequestReports:
        """See `EngineClient.explain_request`."""
        check_request_id(request_id)
        return self._engine.explain_request(request_id)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `EngineClient.tokenize`."""
        return await self._text.tokenize(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `EngineClient.detokenize`."""
        return await self._text.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def pair_prompt(self, first: Prompt, second: Prompt, *, truncate_prompt_tokens: int | None = None) -> Prompt:
        """See `EngineClient.pair_prompt`."""
        return await self._text.pair_prompt(first, second, truncate_prompt_tokens=truncate_prompt_tokens)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatPrompt:
        """See `EngineClient.render_chat`."""
        return await self._text.render_chat(messages, **options)

    def token_texts(self, token_ids: Iterable[int]) -> list[str]:
        """See `EngineClient.token_texts`."""
        return self._text.token_texts(token_ids)

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream yields a last output with finish_reason "abort". Unknown ids are passed over."""
        await self._steps.abort(request_id)

    async def hold(self, request_ids: str | Iterable[str]) -> None:
        """See `LLMEngine.hold`; takes effect after the step that runs. Streams yield nothing more until `resume`."""
        await self._steps.call(partial(self._engine.hold, request_ids))

    async def resume(self, request_ids: str | Iterable[str] | None = None) -> None:
        """See `LLMEngine.resume`."""
        await self._steps.call(partial(self._engine.resume, request_ids))

    async def pause(self, mode: PauseMode = "abort") -> None:
        """See `EngineClient.pause`."""
        await asyncio.wrap_future(await self._steps.call(partial(self._engine.pause, mode)))

    async def is_paused(self) -> bool:
        """See `EngineClient.is_paused`."""
        return self._engine.is_paused()

    async def add_lora(self, request: LoRARequest) -> LoadedLoRA:
        """See `TokenEngine.add_lora`; steps go on meanwhile."""
        return await asyncio.wrap_future(await self._steps.call(partial(self._engine.start_lora, request)))

    async def remove_lora(self, adapter: str | int) -> None:
        """See `TokenEngine.remove_lora`."""
        await self._steps.call(partial(self._engine.remove_lora, adapter))

    async def list_loras(self) -> list[LoadedLoRA]:
        """See `TokenEngine.list_loras`."""
        return await self._steps.call(self._engine.list_loras)

    async def pin_lora(self, adapter: str | int) -> None:
        """See `TokenEngine.pin_lora`."""
        await self._steps.call(partial(self._engine.pin_lora, adapter))

    async def reset_prefix_cache(self) -> PrefixCacheReset:
        """See `LLMEngine.reset_prefix_cache`; runs between two steps."""
        return await self._steps.call(self._engine.reset_prefix_cache)

    async def on_kv_events(self, listener: KVListener) -> Callable[[], None]:
        """As `LLMEngine.on_kv_events`; the listener is called in this event loop."""
        loop = asyncio.get_running_loop()

        def hand_over(events: Sequence[CacheEvent]) -> None:
            loop.call_soon_threadsafe(listener, events)

        return await self._steps.call(partial(self._engine.on_kv_events, hand_over))

    async def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> int:
        """See `LLMEngine.sleep`; runs between two steps."""
        return await self._steps.call(lambda: self._engine.sleep(level, tags))

    async def wake_up(
        self, tags: Collection[str] | None = None, *, new_weights: bool = False, for_update: bool = False
    ) -> None:
        """See `LLMEngine.wake_up`; runs between two steps."""
        await self._steps.call(partial(self._engine.wake_up, tags, new_weights=new_weights, for_update=for_update))

    async def is_sleeping(self) -> bool:
        """See `LLMEngine.is_sleeping`; asked between two steps."""
        return await self._steps.call(self._engine.is_sleeping)

    async def regions(self) -> tuple[RegionStatus, ...]:
        """See `LLMEngine.regions`; asked between two steps."""
        return await self._steps.call(self._engine.regions)

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | None = None) -> None:
        """See `WeightUpdates.init_weight_transfer_engine`."""
        await self._steps.call(partial(self._engine.init_weight_transfer_engine, init_info))

    async def start_weight_update(
        self, is_checkpoint_format: bool = True, *, weight_version: int | None = None, partial: bool = False
    ) -> int:
        """See `WeightUpdates.start_weight_update`."""
        options: dict[str, Any] = {"weight_version": weight_version, "partial": partial}
        return await self._steps.call(lambda: self._engine.start_weight_update(is_checkpoint_format, **options))

    async def update_weights(self, update_info: Mapping[str, Any], *, drafter: str | None = None) -> None:
        """See `WeightUpdates.update_weights`."""
        await self._steps.call(partial(self._engine.update_weights, update_info, drafter=drafter))

    async def finish_weight_update(self) -> WeightsReport:
        """See `WeightUpdates.finish_weight_update`."""
        return await self._steps.call(self._engine.finish_weight_update)

    async def abort_weight_update(self) -> None:
        """See `WeightUpdates.abort_weight_update`."""
        await self._steps.call(self._engine.abort_weight_update)

    async def weights(self) -> WeightsReport:
        """Version and checksum of the weights that the engine has. From any thread."""
        return self._engine.weights()

    async def cache_statistics(self) -> KVStatistics:
        """See `LLMEngine.cache_statistics`; runs between two steps."""
        return await self._steps.call(self._engine.cache_statistics)

    async def metrics(self) -> Exposition:
        """See `EngineClient.metrics`; at once, also while a step runs."""
        return self._engine.metrics()

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Stops after the step that runs, and waits for that; streams that are open end with an error. Idempotent.

        A step that lasts longer than `timeout_s` seconds is ended where workers are processes of their own. A step in
        this process goes on in its thread; a warning is logged, and the engine is closed once the step is done.
        """
        self._steps.end(timeout_s)
        self._text.close()

    def __enter__(self) -> AsyncLLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
