"""An engine for tests of routes: it counts the streams that a route leaves open, and it holds requests or fails at a
moment that a test names."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.contracts.engine_client import EngineFacts, RequestPlan, RequestReports, RequestStream
from dovetail.contracts.lora import LoadedLoRA, LoRARequest
from dovetail.contracts.outputs import RequestOutput
from dovetail.contracts.pausing import PauseMode
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.prompts import ChatPrompt, Prompt
from dovetail.contracts.regions import RegionStatus
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.telemetry import Exposition, StepStats, TelemetrySink
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.async_engine import AsyncLLMEngine
from dovetail.engine.engine import LLMEngine


@dataclass(frozen=True, kw_only=True)
class Script:
    """What happens to requests that are submitted from now on."""

    refusal: Exception | None = None
    """`submit` raises it."""
    num_outputs: int | None = None
    """Outputs that a stream yields before it waits, or fails; None: all."""
    failure: Exception | None = None
    """What the stream raises then; None: the request is held, and the stream waits."""


class _Pace(TelemetrySink):
    """Holds requests after each of their steps that brought tokens. Whoever reads them resumes them for one more: the
    engine's thread waits for no event loop, and could be done with all tokens before a reader has the first."""

    contract = (1, 0)

    def __init__(self, engine: LLMEngine):
        self._num_tokens: dict[str, int] = {}
        """Of each request when it was last held."""
        self._engine = engine

    def begin(self, request_id: str) -> None:
        """Before the request is submitted."""
        self._num_tokens[request_id] = 0

    def end(self, request_id: str) -> None:
        """Once nobody reads it any more."""
        self._num_tokens.pop(request_id, None)

    def on_step(self, stats: StepStats) -> None:
        """In the engine's thread."""
        for request_id, before in list(self._num_tokens.items()):
            now = self._engine.token_progress([request_id]).num_output_tokens
            if now > before and request_id in self._num_tokens:
                self._num_tokens[request_id] = now
                self._engine.hold(request_id)


class WatchedEngine:
    """An `EngineClient` over an engine in this process."""

    def __init__(self, engine: AsyncLLMEngine):
        self.script = Script()
        self.is_waiting = threading.Event()
        """Set by a stream that waits, as its script says."""
        self.num_open = 0
        """Streams that were neither closed nor read to their end."""
        self._engine = engine
        self._ids = itertools.count()
        self._pace = _Pace(engine._engine)
        engine._engine.use.share()  # its thread may be in it
        engine._engine.add_telemetry_sink(self._pace)

    @property
    def facts(self) -> EngineFacts:
        """See `EngineClient.facts`."""
        return self._engine.facts

    @property
    def is_running(self) -> bool:
        """See `EngineClient.is_running`."""
        return self._engine.is_running

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> RequestStream:
        """See `EngineClient.submit`."""
        if self.script.refusal is not None:
            raise self.script.refusal
        script = self.script
        request_id = request_id if request_id is not None else f"watched-{next(self._ids)}"
        if script.num_outputs is not None:
            self._pace.begin(request_id)
        try:
            stream = await self._engine.submit(prompt, sampling_params, request_id, **options)
        except BaseException:
            self._pace.end(request_id)
            raise
        self.num_open += 1
        return _WatchedStream(self, stream, script)

    async def hold(self, request_id: str) -> None:
        """Has a request compute nothing more."""
        await self._engine.hold(request_id)

    async def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        await self._engine.abort(request_id)

    async def plan_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestPlan:
        """See `EngineClient.plan_request`."""
        return await self._engine.plan_request(prompt, sampling_params)

    async def explain_request(self, request_id: str) -> RequestReports:
        """See `EngineClient.explain_request`."""
        return await self._engine.explain_request(request_id)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `EngineClient.tokenize`."""
        return await self._engine.tokenize(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `EngineClient.detokenize`."""
        return await self._engine.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def pair_prompt(self, first: Prompt, second: Prompt, *, truncate_prompt_tokens: int | None = None) -> Prompt:
        """See `EngineClient.pair_prompt`."""
        return await self._engine.pair_prompt(first, second, truncate_prompt_tokens=truncate_prompt_tokens)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatPrompt:
        """See `EngineClient.render_chat`."""
        return await self._engine.render_chat(messages, **options)

    def token_texts(self, token_ids: Iterable[int]) -> list[str]:
        """See `EngineClient.token_texts`."""
        return self._engine.token_texts(token_ids)

    async def add_lora(self, request: LoRARequest) -> LoadedLoRA:
        """See `EngineClient.add_lora`."""
        return await self._engine.add_lora(request)

    async def remove_lora(self, adapter: str | int) -> None:
        """See `EngineClient.remove_lora`."""
        await self._engine.remove_lora(adapter)

    async def list_loras(self) -> list[LoadedLoRA]:
        """See `EngineClient.list_loras`."""
        return await self._engine.list_loras()

    async def pin_lora(self, adapter: str | int) -> None:
        """See `EngineClient.pin_lora`."""
        await self._engine.pin_lora(adapter)

    async def pause(self, mode: PauseMode = "abort") -> None:
        """As the engine's."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """As the engine's."""
        await self._engine.resume()

    async def is_paused(self) -> bool:
        """As the engine's."""
        return await self._engine.is_paused()

    async def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> int:
        """As the engine's."""
        return await self._engine.sleep(level, tags)

    async def wake_up(
        self, tags: Collection[str] | None = None, *, new_weights: bool = False, for_update: bool = False
    ) -> None:
        """As the engine's."""
        await self._engine.wake_up(tags, new_weights=new_weights, for_update=for_update)

    async def regions(self) -> tuple[RegionStatus, ...]:
        """As the engine's."""
        return await self._engine.regions()

    async def is_sleeping(self) -> bool:
        """As the engine's."""
        return await self._engine.is_sleeping()

    async def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | None = None) -> None:
        """As the engine's."""
        await self._engine.init_weight_transfer_engine(init_info)

    async def start_weight_update(
        self, is_checkpoint_format: bool = True, *, weight_version: int | None = None, partial: bool = False
    ) -> int:
        """As the engine's."""
        return await self._engine.start_weight_update(
            is_checkpoint_format, weight_version=weight_version, partial=partial
        )

    async def update_weights(self, update_info: Mapping[str, Any], *, drafter: str | None = None) -> None:
        """As the engine's."""
        await self._engine.update_weights(update_info, drafter=drafter)

    async def finish_weight_update(self) -> WeightsReport:
        """As the engine's."""
        return await self._engine.finish_weight_update()

    async def abort_weight_update(self) -> None:
        """As the engine's."""
        await self._engine.abort_weight_update()

    async def weights(self) -> WeightsReport:
        """As the engine's."""
        return await self._engine.weights()

    async def metrics(self) -> Exposition:
        """An exposition without a metric."""
        return Exposition(content_type="text/plain; version=0.0.4", body=b"")

    async def check_health(self) -> None:
        """See `EngineClient.check_health`."""
        await self._engine.check_health()

    async def num_used_blocks(self) -> int:
        """KV blocks that requests hold."""
        return (await self._engine.cache_statistics()).num_used_blocks


class _WatchedStream:
    """A stream that follows its script."""

    def __init__(self, engine: WatchedEngine, stream: RequestStream, script: Script):
        self.request_id = stream.request_id
        self._engine = engine
        self._stream = stream
        self._script = script
        self._outputs = aiter(stream)
        self._num_outputs = 0
        self._is_open = True

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        script = self._script
        waits = self._num_outputs == script.num_outputs
        if waits and script.failure is not None:
            self.close()
            raise script.failure
        if waits:
            self._engine.is_waiting.set()
        elif self._num_outputs and script.num_outputs is not None:
            await self._engine._engine.resume(self.request_id)
        try:
            output = await anext(self._outputs)
            while waits and not output.finished:  # of a step before it was held
                output = await anext(self._outputs)
        except Exception:  # the request failed, or there is no more
            self._end()
            raise
        self._num_outputs += 1
        if output.finished:
            self._end()
        return output

    def close(self) -> None:
        """See `RequestStream.close`."""
        self._end()
        self._stream.close()

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._engine.num_open -= 1
            self._engine._pace.end(self.request_id)


__all__ = ["Script", "WatchedEngine"]
