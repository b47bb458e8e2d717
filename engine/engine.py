"""`LLMEngine`: requests in, outputs with text out, one step at a time. `LLM` and `AsyncLLMEngine` stand on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from dovetail.config.layers import LayeredConfig
from dovetail.config.load import load_config
from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.engine_client import EngineFacts, RequestReports
from dovetail.contracts.lora import LoadedLoRA, LoRARequest
from dovetail.contracts.outputs import RequestOutput, SpeculationTotals, TokenProgress
from dovetail.contracts.pausing import PauseMode
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.prompts import Prompt
from dovetail.contracts.regions import RegionStatus
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.telemetry import Exposition, TelemetrySink
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.client_text import ClientText
from dovetail.engine.core import EngineCore
from dovetail.engine.exclusive_use import ExclusiveUse, exclusive
from dovetail.engine.input_processor import InputProcessor, ProcessedInput
from dovetail.engine.kv.manager import KVStatistics
from dovetail.engine.kv.pool import PrefixCacheReset
from dovetail.engine.kv_events import KVListener
from dovetail.engine.output_processor import OutputProcessor
from dovetail.engine.output_stream import joined
from dovetail.engine.resolving import resolve
from dovetail.engine.sequence import Sequence
from dovetail.engine.step_loop import ScheduledStep
from dovetail.engine.step_update import StepUpdate
from dovetail.engine.token_engine import SHUTDOWN_S, TokenEngine
from dovetail.engine.tokenization.tokenizer import Tokenizer
from dovetail.worker.machine.collector import collector_paused


class LLMEngine:
    """The engine behind a step loop that the caller drives.

    One thread at a time drives it, any thread: a call that finds another thread in the engine raises `RequestError`.
    `LLM` and `AsyncLLMEngine` serve several threads. In a process that was forked off the one that made the engine
    every call raises `WorkerError`, and `shutdown` does nothing.
    """

    def __init__(self, config: ResolvedConfig):
        self.config = config
        self.tokens = TokenEngine(config)
        """The engine without text."""
        self.tokenizer: Tokenizer | None = self.tokens.tokenizer
        self._input_lock = threading.Lock()
        self._inputs = InputProcessor(self.tokens.facts, self.tokenizer)
        self._outputs = OutputProcessor(self.tokenizer, self.tokens.facts.kv_transfer_params)

    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any] | LayeredConfig | None = None,
        *,
        options: Iterable[str] = (),
        **keywords: Any,
    ) -> Self:
        """An engine from a config file (or mapping), `key=value` options and keywords.

        Keywords are the sections of the file or the names that vLLM users know. Raises `ConfigError`, `PluginError`,
        `ModelError` or `CapacityError`, each saying what to do.
        """
        with collector_paused():
            return cls(resolve(load_config(config, keywords=keywords, overrides=options)))

    @property
    def facts(self) -> EngineFacts:
        """What clients know of the engine."""
        return self.tokens.facts

    @property
    def devices(self) -> tuple[str, ...]:
        """See `TokenEngine.devices`."""
        return self.tokens.devices

    @property
    def use(self) -> ExclusiveUse:
        """Who is in the engine. Its methods enter by themselves; whoever works on `core` must do so too."""
        return self.tokens.use

    def process_input(self, prompt: Prompt, params: SamplingParams | PoolingParams | None = None) -> ProcessedInput:
        """Validates and tokenizes, without adding. Raises `RequestError`. Safe to call from any thread."""
        self.use.check_process()
        with self._input_lock:
            return self._inputs.process(prompt, params)

    def create_client_text(self) -> ClientText:
        """What coroutines tokenize and decode with."""
        return ClientText(InputProcessor(self.facts, self.tokenizer), self.tokenizer)

    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation config recommends; used where a request gives no parameters."""
        return self._inputs.default_sampling_params()

    @exclusive
    def add_request(
        self,
        request_id: str,
        prompt: Prompt | ProcessedInput,
        params: SamplingParams | PoolingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        user: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queues a request. Raises `RequestError` if it cannot be served. One with `PoolingParams` ends when its prompt
        is computed: its one output has `pooled`, and `PoolingRequestOutput.from_request` names it as vLLM does.

        `cache_salt`: only requests with the same salt share prefix-cache entries; the prompt's own goes first. Lower
        `priority` runs first; a scheduler that does not look at it takes 0 only. `trace_headers`: headers of the
        request, of which `traceparent` and `tracestate` (W3C Trace Context) go to the telemetry sinks.
        `user`: for whom it is, so that an experiment may give all requests of one user the same arm; None: whoever has
        the `cache_salt`. `lora_request`: the adapter that is added to the weights. One that is not loaded is read
        first; the request waits for it, and fails where it cannot be used.
        """
        processed = prompt if isinstance(prompt, ProcessedInput) else self.process_input(prompt, params)
        if lora_request is not None:
            processed = replace(processed, lora_request=lora_request)
        entry = self.tokens.add_request(
            request_id,
            processed,
            priority=priority,
            arrival_time=arrival_time,
            cache_salt=cache_salt,
            trace_headers=trace_headers,
            user=user,
        )
        seq_ids = [sequence.seq_id for sequence in entry.sequences]
        self._outputs.add(request_id, processed, seq_ids, entry.metrics, entry.weight_version, entry.weight_checksum)

    @exclusive
    def step(self) -> list[RequestOutput]:
        """Runs one step and returns the outputs that it brought: none where all requests are held.

        What fails in a step ends the requests that took part, with finish_reason "error". What is raised from here ends
        all pending requests, without a last output: `WorkerError` when a worker died, and a new engine is needed;
        `PluginError` of a broken scheduler, or whatever else a plugin raises, `KeyboardInterrupt`: after these it can
        go on.
        """
        try:
            update = self.tokens.step()
            return self._outputs_of(update) if update is not None else []
        except BaseException as error:
            self._end_all(error)
            raise

    @exclusive
    def schedule(self) -> ScheduledStep | None:
        """The first half of `step`, for drivers that do something before it is executed: which requests the next step
        computes, and how many tokens of each. None where there is nothing to do: no requests, or all are held.

        Until it is executed, by `execute_step` or by `step`, it stays the next: asked again, `schedule` returns it,
        what was added or held meanwhile waits for the step after it, and a pause that computes nothing more executes
        it first. Where requests of it were aborted, `schedule` returns a record without them, and the one before is
        refused. Raises as `step` does.
        """
        try:
            return self.tokens.steps.schedule()
        except BaseException as error:
            self._end_all(error)
            raise

    @exclusive
    def execute_step(self, scheduled: ScheduledStep) -> list[RequestOutput]:
        """The second half of `step`: executes what `schedule` returned last and returns the outputs that it brought.

        Raises `EngineConflict`, and changes nothing, for any other step: one that was executed, that is another
        engine's, or of which requests were aborted, or a pause began, since it was scheduled. Raises as `step` does.
        """
        self.tokens.steps.check(scheduled)
        try:
            return self._outputs_of(self.tokens.steps.execute(scheduled))
        except BaseException as error:
            self._end_all(error)
            raise

    def _outputs_of(self, update: StepUpdate) -> list[RequestOutput]:
        outputs, stops = self._outputs.process(update)
        return joined(outputs, self._outputs.process(self.tokens.stop(stops))[0]) if stops else outputs

    def _end_all(self, error: BaseException) -> None:
        """Ends all pending requests, without a last output."""
        self.tokens.end_all(error)
        self._outputs.clear()

    @exclusive
    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """Ends requests at once, in whatever state they are, and frees what they held. Unknown ids are ignored.

        Returns the last output of each, with finish_reason "abort". Raises `RequestError` for what is no id, and
        `PluginError` where the scheduler raises, once all have ended.
        """
        try:
            update = self.tokens.abort_request(request_ids)
        except BaseException:
            self._outputs.keep_only(self.request_ids)
            raise
        return self._outputs.process(update)[0]

    def hold(self, request_ids: str | Iterable[str]) -> None:
        """Requests compute nothing from the next step on until they are resumed; tokens of steps in flight still come.

        They keep their KV blocks, unless others need these, and their drafts; they can be aborted. From any thread,
        also during a step; unknown ids are ignored. Raises `RequestError` for what is no id.
        """
        self.tokens.hold(request_ids)

    def resume(self, request_ids: str | Iterable[str] | None = None) -> None:
        """Held requests go on from where they are. From any thread; unknown ids are ignored. Raises `RequestError` for
        what is no id.

        None: ends a pause, as `Pausing.resume` does, between two steps."""
        if request_ids is None:
            self.tokens.pausing.resume()
        else:
            self.tokens.resume(request_ids)

    def pause(self, mode: PauseMode = "abort") -> Future[None]:
        """See `Pausing.pause`. What it ends is among the outputs of the next steps."""
        return self.tokens.pausing.pause(mode)

    def is_paused(self) -> bool:
        """Whether new requests are held until `resume`. From any thread."""
        return self.tokens.pausing.is_paused

    @property
    def is_runnable(self) -> bool:
        """Whether `step` has something to do: not while all requests are held. May be asked from any thread."""
        return self.tokens.is_runnable

    @property
    def wakeup(self) -> threading.Condition:
        """Notified when requests are added, held, resumed or aborted, and at `shutdown`: what a driver waits on while
        not `is_runnable`, without being in the engine."""
        return self.tokens.wakeup

    def has_unfinished_requests(self) -> bool:
        """Whether some request is not finished, those that are held included, or a step is in flight."""
        return self.tokens.has_unfinished_requests()

    def get_num_unfinished_requests(self) -> int:
        """How many requests are not finished."""
        return self.tokens.get_num_unfinished_requests()

    @property
    def request_ids(self) -> list[str]:
        """Requests that are not finished, in order of arrival."""
        return self.tokens.request_ids

    def token_progress(self, request_ids: Iterable[str]) -> TokenProgress:
        """How far those of `request_ids` are that have not finished; the others count nothing. O(requests)."""
        return self.tokens.token_progress(request_ids)

    @property
    def core(self) -> EngineCore:
        """The step loop, for drivers such as beam search that work on sequences."""
        return self.tokens.core

    def create_sequence(self, request_id: str, processed: ProcessedInput, fork_parent: Sequence | None) -> Sequence:
        """A sequence outside of any request: its tokens are the caller's to read."""
        return self.tokens.create_sequence(request_id, processed, fork_parent)

    def reset_prefix_cache(self) -> PrefixCacheReset:
        """Forgets cached prefixes; says how many blocks were dropped, and how many stay while requests use them."""
        return self.tokens.reset_prefix_cache()

    def start_lora(self, request: LoRARequest) -> Future[LoadedLoRA]:
        """See `TokenEngine.start_lora`."""
        return self.tokens.start_lora(request)

    def add_lora(self, request: LoRARequest) -> LoadedLoRA:
        """See `TokenEngine.add_lora`."""
        return self.tokens.add_lora(request)

    def remove_lora(self, adapter: str | int) -> None:
        """See `TokenEngine.remove_lora`."""
        self.tokens.remove_lora(adapter)

    def list_loras(self) -> list[LoadedLoRA]:
        """See `TokenEngine.list_loras`."""
        return self.tokens.list_loras()

    def pin_lora(self, adapter: str | int) -> None:
        """See `TokenEngine.pin_lora`."""
        self.tokens.pin_lora(adapter)

    def forget_finished(self) -> None:
        """See `TokenEngine.forget_finished`."""
        self.tokens.forget_finished()

    def add_telemetry_sink(self, sink: TelemetrySink) -> None:
        """Tells `sink` of every step and request from now on, with the sinks of the config; it is closed with the
        engine."""
        self.tokens.add_telemetry_sink(sink)

    def on_kv_events(self, listener: KVListener) -> Callable[[], None]:
        """Calls `listener` with a list of `BlocksStored`, `BlocksRemoved` and `AllBlocksCleared`
        (`dovetail.contracts.router`) for what enters and leaves the prefix cache. Returns a function that ends it.

        The first call comes at once and says what the cache has: `AllBlocksCleared`, and `BlocksStored` with the hashes
        alone where it is not empty. Then one call follows after each step that changed it, before the step's outputs
        are returned, and after each call that did (`reset_prefix_cache`, `sleep`, weight updates). It comes in the
        thread that is in the engine and must return at once. A listener that raises is logged and dropped.
        """
        return self.tokens.kv_events.listen(listener)

    def sleep(self, level: int = 1, tags: Collection[str] | None = None) -> int:
        """Gives memory back while nothing runs; returns the bytes.

        Args:
            level: 1 sets the weights aside, in host memory (on a CPU: in a file), 2 discards those that the checkpoint
                has, which `wake_up` reads again. Drafters' weights are set aside at both. Cached prefixes are lost,
                and the KV blocks of requests that a pause holds: these are computed again.
            tags: which regions: "weights", "kv_cache", "drafter:" and a label; None: all that are awake. Weights sleep
                with the KV cache, or after it.

        Raises `EngineConflict` while requests are unfinished that no pause holds, or a region sleeps; `RequestError`
        for what is no region, `ConfigError` for another level, `CapacityError` where nothing can be set aside.
        """
        return self.tokens.sleeping.sleep(level, tags)

    def wake_up(
        self, tags: Collection[str] | None = None, *, new_weights: bool = False, for_update: bool = False
    ) -> None:
        """Takes memory again.

        After level 2 the checkpoint must be the one that was loaded, by size and time of its files, and the weights
        must not have been updated since, or `ModelError` is raised and the engine sleeps on.

        Args:
            tags: as in `sleep`; None: all that sleep. The KV cache wakes up with the weights, or after them.
            new_weights: take whatever checkpoint is there now.
            for_update: do not read weights that level 2 discarded. They are invalid until an update brings all of
                them, and the KV cache sleeps on until then.

        Raises `EngineConflict` for a region that is awake, for the KV cache before the weights, and for either option
        where no weights wake up that level 2 discarded.
        """
        self.tokens.sleeping.wake_up(tags, new_weights=new_weights, for_update=for_update)

    def is_sleeping(self) -> bool:
        """Whether `wake_up` must come before requests."""
        return self.tokens.is_sleeping()

    def regions(self) -> tuple[RegionStatus, ...]:
        """The states of its memory: weights, KV cache, the weights of each drafter."""
        return self.tokens.regions.statuses

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any] | None = None) -> None:
        """See `WeightUpdates.init_weight_transfer_engine`."""
        self.tokens.weight_updates.init_weight_transfer_engine(init_info)

    def start_weight_update(
        self, is_checkpoint_format: bool = True, *, weight_version: int | None = None, partial: bool = False
    ) -> int:
        """See `WeightUpdates.start_weight_update`."""
        return self.tokens.weight_updates.start_weight_update(
            is_checkpoint_format, weight_version=weight_version, partial=partial
        )

    def update_weights(self, update_info: Mapping[str, Any], *, drafter: str | None = None) -> None:
        """See `WeightUpdates.update_weights`."""
        self.tokens.weight_updates.update_weights(update_info, drafter=drafter)

    def finish_weight_update(self) -> WeightsReport:
        """See `WeightUpdates.finish_weight_update`."""
        return self.tokens.weight_updates.finish_weight_update()

    def abort_weight_update(self) -> None:
        """See `WeightUpdates.abort_weight_update`."""
        self.tokens.weight_updates.abort_weight_update()

    def weights(self) -> WeightsReport:
        """Version and checksum of the weights that the engine has. From any thread."""
        return self.tokens.weight_updates.report

    def determine_num_available_blocks(self) -> tuple[int, int]:
        """See `TokenEngine.determine_num_available_blocks`."""
        return self.tokens.determine_num_available_blocks()

    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int = 0) -> None:
        """See `TokenEngine.initialize_cache`."""
        self.tokens.initialize_cache(num_device_blocks, num_host_blocks)

    def cache_statistics(self) -> KVStatistics:
        """Blocks used, cached and in all; prefix tokens looked up and found."""
        return self.tokens.cache_statistics()

    def speculation_totals(self) -> dict[str, SpeculationTotals]:
        """What became of each drafter's guesses since the engine started; empty before the first round."""
        return self.tokens.speculation_totals()

    def metrics(self) -> Exposition:
        """See `TokenEngine.metrics`; from any thread, at once."""
        return self.tokens.metrics()

    def keep_ended(self, most: int) -> None:
        """See `TokenEngine.keep_ended`."""
        self.tokens.keep_ended(most)

    def explain_request(self, request_id: str) -> RequestReports:
        """See `TokenEngine.explain_request`; from any thread, at once."""
        return self.tokens.explain_request(request_id)

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Stops workers and sinks. Idempotent; pending requests are dropped.

        While a step runs in another thread, this waits for its end, at most `timeout_s` seconds. Then workers that are
        processes are ended all the same, and the step raises `WorkerError`. A step in this process cannot be ended:
        a warning is logged, and the engine is closed when the step has come to its end.
        """
        self.tokens.shutdown(timeout_s)

    @property
    def is_closed(self) -> bool:
        """Whether it was shut down and all is stopped."""
        return self.tokens.is_closed

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
