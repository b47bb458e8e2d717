"""`TokenEngine`: token ids in, token ids out, one step at a time. It knows no text: whoever gives it requests tokenizes
them before, and makes text of what comes, in this process (`LLMEngine`) or in another (`RemoteEngine`)."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.engine_client import EngineFacts, RequestReports
from dovetail.contracts.errors import PluginError, RequestError
from dovetail.contracts.lora import LoadedLoRA, LoRARequest
from dovetail.contracts.outputs import RequestMetrics, SpeculationTotals, TokenProgress
from dovetail.contracts.pausing import EngineConflict
from dovetail.contracts.regions import WEIGHTS, RegionState
from dovetail.contracts.telemetry import Assignment, Exposition, TelemetrySink
from dovetail.engine.adapters.adapter import Adapter
from dovetail.engine.adapters.known import KnownAdapter
from dovetail.engine.adapters.served import ServedAdapters
from dovetail.engine.core import EngineCore
from dovetail.engine.draft_blocks import draft_blocks
from dovetail.engine.exclusive_use import ExclusiveUse, exclusive
from dovetail.engine.experiments import Experiments
from dovetail.engine.external.connected import NO_CONNECTOR, connect_blocks
from dovetail.engine.facts import engine_facts
from dovetail.engine.holds import Holds
from dovetail.engine.idle_drafters import IdleDrafters
from dovetail.engine.idle_memory import IdleMemory
from dovetail.engine.input_processor import ProcessedInput
from dovetail.engine.kv.hashing import prefix_seed
from dovetail.engine.kv.manager import KVStatistics
from dovetail.engine.kv.pool import PrefixCacheReset
from dovetail.engine.kv_events import KVEvents
from dovetail.engine.pausing import Pausing
from dovetail.engine.pending_grammars import GrammarWait, PendingGrammars
from dovetail.engine.regions import Regions
from dovetail.engine.request_fields import (
    as_request_ids,
    as_trace_context,
    check_order,
    check_priority,
    check_request_id,
    check_salt,
    check_user,
)
from dovetail.engine.request_reports import reports_of
from dovetail.engine.request_table import RequestEntry, RequestTable
from dovetail.engine.sequence import Sequence
from dovetail.engine.setup import allocate_kv, check_block_counts, create_parts
from dovetail.engine.sleeping import Sleeping
from dovetail.engine.step import Ending
from dovetail.engine.step_loop import StepLoop
from dovetail.engine.step_update import GRAMMAR_REFUSED, StepUpdate, TextStop
from dovetail.engine.telemetry import Telemetry
from dovetail.engine.tokenization.tokenizer import Tokenizer
from dovetail.engine.weights.held import HeldWeights
from dovetail.engine.weights.updates import WeightUpdates

logger = logging.getLogger(__name__)

SHUTDOWN_S = 30.0
"""How long `shutdown` waits for a step that runs in another thread, unless it is told otherwise."""
KEPT_REQUESTS = 1000
"""Requests that can be explained after their end, where nobody says another number."""
_SEED_MASK = (1 << 64) - 1
_SIBLING_STRIDE = 0x9E3779B97F4A7C15  # odd, so that siblings' seeds never meet


class TokenEngine:
    """The engine behind a step loop that the caller drives.

    One thread at a time drives it, any thread: a call that finds another thread in the engine raises `RequestError`.
    In a process forked off the one that made the engine calls raise `WorkerError`, and `shutdown` does nothing.
    """

    def __init__(self, config: ResolvedConfig):
        self.config = config
        self.use = ExclusiveUse()
        """Who is in the engine. Its methods enter by themselves; whoever works on `core` must do so too."""
        self._parts = parts = create_parts(config)
        self.workers = parts.workers
        """Called between steps."""
        self.devices = parts.devices
        """Of the workers, in rank order, as torch names them ("cpu", "cuda:0")."""
        self.facts: EngineFacts = engine_facts(
            config, type(parts.scheduler), parts.acceptance, parts.tokenizer, parts.grammars.facts
        )
        self._holds = Holds()
        self._telemetry = Telemetry(config, parts.sinks, parts.hooks, parts.executor)
        self._requests = RequestTable(self._telemetry)
        self.pausing = Pausing(self, self.use, self._requests, self._telemetry, self._holds.notify)
        self.steps = StepLoop(
            self, self.use, self.pausing, self._requests, self._telemetry, self._take_news, self._note_rest
        )
        """Its steps, and the halves of one."""
        self._adapters = ServedAdapters(config, self._requests, self._holds.notify)
        self._core = self._create_core()
        self._experiments = Experiments(config.experiments, self.facts) if config.experiments else None
        self._seq_ids = itertools.count(1)
        self._seeds = random.Random(config.model.seed)
        self._idle_drafters = IdleDrafters()
        self._idle_memory = IdleMemory()
        self._pending_grammars = PendingGrammars(self._holds.notify)
        self.regions = Regions(config.speculation.drafters if config.speculation is not None else ())
        """Which of its memory is there."""
        self._weights = HeldWeights(
            config, parts.kv.layout, self._telemetry, self.regions, self._requests, self.reset_prefix_cache
        )
        self.weight_updates = WeightUpdates(
            config, self.use, self._weights, self.workers, self._why_weights_stay, self._free_weights
        )
        self.sleeping = Sleeping(
            self, self.use, self.regions, self.workers, self.pausing, self._adapters, self._weights
        )
        self._telemetry.attach(self._core, parts.kv)
        self.kv_events = KVEvents(self.use, parts.kv, self._telemetry.kv_listeners())
        self._telemetry.engine_started(self._holds)
        self._closed = False
        self.exchange = NO_CONNECTOR
        try:
            self.exchange = connect_blocks(config, parts, self._weights, self._core, self.regions, self._holds.notify)
            self._adapters.read_configured()
        except BaseException:
            self._close()
            raise

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, which the engine itself does not use; None with tokenizer_mode none."""
        return self._parts.tokenizer

    @exclusive
    def add_request(
        self,
        request_id: str,
        processed: ProcessedInput,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> RequestEntry:
        """Queues a request. Raises `RequestError` if it cannot be served.

        `cache_salt`: only requests with the same salt share prefix-cache entries; the prompt's own goes first. Lower
        `priority` runs first; a scheduler that does not look at it takes 0 only. `trace_headers`: headers of the
        request, of which `traceparent` and `tracestate` (W3C Trace Context) go to the telemetry sinks.
        `user`: for whom it is, so that an experiment may give all requests of one user the same arm; None: whoever has
        the `cache_salt`.
        """
        self._check_new(request_id, processed, priority)
        check_order(priority, arrival_time)
        check_salt(cache_salt)
        check_user(user)
        arrival = time.monotonic() if arrival_time is None else arrival_time
        salt = processed.cache_salt if processed.cache_salt is not None else cache_salt
        known = self._adapters.named(processed.lora_request)
        processed, assignment = self._assigned(request_id, processed, salt if user is None else user)
        sequences = self._create_sequences(request_id, processed, priority, arrival, salt, known)
        entry = RequestEntry(
            request_id,
            processed.params,
            len(processed.token_ids),
            self._weights.report.version,
            self._weights.report.checksum,
            sequences,
            RequestMetrics(arrival, drafter=processed.drafter),
            num_open=len(sequences),
            trace_context=as_trace_context(trace_headers),
            cache_salt=salt,
            drafter_is_idle=sequences[0].drafter != processed.drafter,
            assignment=assignment,
            adapter=known.name if known is not None else "",
        )
        self._requests.add(entry, streams=processed.streams_tokens)
        try:
            self._core.add_siblings(sequences[0], sequences[1:], processed.bad_word_ids)
        except BaseException:
            self._requests.drop(request_id)
            raise
        self.pausing.admit(sequences)
        entry.grammar_wait = self._wait_for_grammar(sequences)
        self._adapters.wait(known, sequences, salt)
        self.exchange.consider(sequences[0])
        self._telemetry.request_added(entry, self._holds)
        self._idle_memory.work()
        self._holds.notify()
        return entry

    def _check_new(self, request_id: str, processed: ProcessedInput, priority: int) -> None:
        check_request_id(request_id)
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use")
        # What was asked so far is not for this request, though one that ended may have had its id.
        self._holds.apply(self._requests.sequences)
        check_priority(priority, self.facts)
        for name, options in processed.params.processors.items():
            self._parts.processors[name].validate(options)

    def step(self) -> StepUpdate | None:
        """Runs one step and returns what it brought, or one that a pause committed; None where all requests are held.

        What fails in a step ends the requests that took part, with finish_reason "error". What is raised from here ends
        all pending requests, without an update: `WorkerError` when a worker died, and a new engine is needed;
        `PluginError` of a broken scheduler, or whatever else a plugin raises, `KeyboardInterrupt`: after these it can
        go on.
        """
        return self.steps.step()

    @exclusive
    def end_all(self, error: BaseException) -> None:
        """Ends all pending requests because of `error`, where nobody knows how far a step came: nothing that is half
        done may go on."""
        with suppress(PluginError):  # a scheduler's that cannot let go either: the first error is reported
            ending = Ending("error", error=str(error) or type(error).__name__)
            self.end_requests(self.request_ids, ending, StepUpdate())

    @exclusive
    def stop(self, stops: Iterable[TextStop]) -> StepUpdate:
        """Ends sequences whose text has a stop string; those that have ended are ignored. Raises `PluginError` where
        the scheduler raises."""
        update, now = StepUpdate(), time.monotonic()
        ended = [sequence for stop in stops if (sequence := self._requests.stop(stop, now, update)) is not None]
        self._core.finish_all(ended)
        self._note_rest()
        return update

    @exclusive
    def abort_request(self, request_ids: str | Iterable[str]) -> StepUpdate:
        """Ends requests at once, in whatever state they are, and frees what they held. Unknown ids are ignored.

        The update has their ends, with finish_reason "abort". Raises `RequestError` for what is no id, and
        `PluginError` where the scheduler raises, once all have ended.
        """
        update = StepUpdate()
        try:
            self.end_requests(as_request_ids(request_ids), Ending("abort"), update)
        finally:
            self._holds.notify()
        self._note_rest()
        return update

    def hold(self, request_ids: str | Iterable[str]) -> None:
        """Requests compute nothing from the next step on until they are resumed; tokens of steps in flight still come.

        They keep their KV blocks, unless others need these, and their drafts; they can be aborted. From any thread,
        also during a step; unknown ids are passed over. Raises `RequestError` for what is no id.
        """
        self._holds.hold(request_ids)

    def resume(self, request_ids: str | Iterable[str]) -> None:
        """Held requests go on from where they are. From any thread; unknown ids are passed over. Raises `RequestError`
        for what is no id."""
        self._holds.resume(request_ids)

    @property
    def is_runnable(self) -> bool:
        """Whether `step` has something to do: not while all requests are held. May be asked from any thread."""
        has_news = self._pending_grammars.landed or self._adapters.has_news or self.pausing.updates
        is_due = self._holds.asked or has_news or self.steps.has_open or self.exchange.is_due
        return bool(is_due) or self._core.is_runnable

    @property
    def wakeup(self) -> threading.Condition:
        """Notified when requests are added, held, resumed or aborted, and at `shutdown`: what a driver waits on while
        not `is_runnable`, without being in the engine."""
        return self._holds.wakeup

    def has_unfinished_requests(self) -> bool:
        """Whether some request is not finished, those that are held included, or a step is in flight."""
        return self._core.has_work or bool(self.pausing.updates) or self.steps.has_open

    def get_num_unfinished_requests(self) -> int:
        """How many requests are not finished."""
        return len(self._requests)

    @property
    def request_ids(self) -> list[str]:
        """Requests that are not finished, in order of arrival."""
        return self._requests.request_ids

    @exclusive
    def token_progress(self, request_ids: Iterable[str]) -> TokenProgress:
        """How far those of `request_ids` are that have not finished; the others count nothing. O(requests)."""
        num_prompt = num_output = 0
        for request_id in request_ids:
            sequences = self._requests.sequences(request_id)
            # Siblings share one prompt.
            num_prompt += max((min(s.num_computed_tokens, s.num_prompt_tokens) for s in sequences), default=0)
            num_output += sum(sequence.num_output_tokens for sequence in sequences)
        return TokenProgress(num_prompt, num_output)

    @property
    def core(self) -> EngineCore:
        """The step loop, for drivers such as beam search that work on sequences."""
        return self._core

    @exclusive
    def create_sequence(self, request_id: str, processed: ProcessedInput, fork_parent: Sequence | None) -> Sequence:
        """A sequence outside of any request: its tokens are the caller's to read."""
        if self.pausing.is_paused:
            raise EngineConflict("the engine is paused, and beam search cannot be held: call resume first")
        known = self._adapters.read(processed.lora_request)
        sequence = self._create_sequences(request_id, processed, 0, time.monotonic(), processed.cache_salt, known)[0]
        sequence.fork_parent = fork_parent
        return sequence

    @exclusive
    def reset_prefix_cache(self) -> PrefixCacheReset:
        """Forgets cached prefixes; says how many blocks were dropped, and how many stay while requests use them."""
        self.exchange.abandon()
        return self.kv_events.reset_prefix_cache()

    @exclusive
    def start_lora(self, request: LoRARequest) -> Future[LoadedLoRA]:
        """As `add_lora`, without waiting: what it raises once the files are read, the future does."""
        return self._adapters.start(request)

    def add_lora(self, request: LoRARequest) -> LoadedLoRA:
        """See `EngineClient.add_lora`; one that is loaded stays as it is."""
        return self.start_lora(request).result()

    @exclusive
    def remove_lora(self, adapter: str | int) -> None:
        """Unloads an adapter, by name or number. Raises `AdapterNotFound`; `AdapterConflict` while requests use it."""
        self._adapters.remove(adapter)

    @exclusive
    def list_loras(self) -> list[LoadedLoRA]:
        """The adapters that are loaded, in the order in which they came."""
        return self._adapters.listed()

    @exclusive
    def pin_lora(self, adapter: str | int) -> None:
        """An adapter, by name or number, keeps its slot. Raises `AdapterNotFound`; `RequestError` for the last slot."""
        self._adapters.pin(adapter)

    @exclusive
    def unpin_lora(self, adapter: str | int) -> None:
        """Takes `pin_lora` back. Raises `AdapterNotFound`; without effect for an adapter that is not pinned."""
        self._adapters.unpin(adapter)

    @exclusive
    def forget_finished(self) -> None:
        """Drafters forget what requests taught them that ended (`LearnsFromRequests.forget_finished`), so that a
        measurement does not meet answers of the one before. Raises `RequestError` while requests are unfinished."""
        if self.request_ids:
            raise RequestError("drafters cannot forget while requests are unfinished: let them end, or abort them")
        self._core.settle()
        self.workers.call("forget_finished")

    @exclusive
    def add_telemetry_sink(self, sink: TelemetrySink) -> None:
        """Tells `sink` of every step and request from now on, beside those of the config; the engine closes it."""
        for listener in self._telemetry.add_sink(sink):
            self.kv_events.listen(listener)

    def is_sleeping(self) -> bool:
        """Whether `wake_up` must come before requests."""
        return self.regions.is_asleep

    def check_generates(self, drafter: str | None) -> None:
        """Raises `EngineConflict` where nothing is generated now, with a drafter (None: without)."""
        speculation = self.config.speculation
        if drafter is None or speculation is None:
            self.regions.check_generates()
        else:
            self.regions.check_generates([drafter, *speculation.drafters[drafter].stages])

    def _why_weights_stay(self) -> str | None:
        if not self.pausing.holds_all:
            return 'while requests are unfinished that no pause holds: pause("keep") first, let them end, or abort them'
        asleep = self.regions.state(WEIGHTS) is RegionState.ASLEEP
        return "while the engine sleeps: call wake_up first" if asleep else None

    def _free_weights(self) -> None:
        """No step reads the weights any more, and no request has KV of them."""
        self.pausing.give_up_memory()
        self._core.settle()
        self.exchange.abandon()

    @exclusive
    def determine_num_available_blocks(self) -> tuple[int, int]:
        """KV blocks on the device and on the host: as many as memory and config gave room for at the start, or as
        `initialize_cache` made since. The device's include one that no request gets."""
        return self._parts.kv.num_blocks, self._parts.kv.host_pool.num_blocks

    @exclusive
    def initialize_cache(self, num_device_blocks: int, num_host_blocks: int = 0) -> None:
        """Replaces the KV memory by one of so many blocks; cached prefixes are lost. For a moment both take memory.

        Raises `RequestError` while requests are unfinished or the engine sleeps, `ConfigError` for what is no number of
        blocks, `CapacityError` for fewer than a sequence of full length takes or more than host memory holds; each
        leaves everything as it was.
        """
        if self.request_ids or self.regions.any_asleep:
            raise RequestError("the KV memory cannot be replaced while requests are unfinished or the engine sleeps")
        check_block_counts(num_device_blocks=num_device_blocks, num_host_blocks=num_host_blocks)
        self._core.settle()
        self.exchange.abandon()
        parts = self._parts
        kv = allocate_kv(self.config, parts.workers, parts.kv.layout, num_device_blocks, num_host_blocks)
        self._parts = replace(parts, kv=kv)
        self._core = self._create_core()
        self._telemetry.attach(self._core, kv)
        self.exchange.replaced(self._parts, self._core)
        self.kv_events.replace_memory(kv)

    @exclusive
    def cache_statistics(self) -> KVStatistics:
        """Blocks used, cached and in all; prefix tokens looked up and found."""
        return self._parts.kv.statistics()

    @exclusive
    def speculation_totals(self) -> dict[str, SpeculationTotals]:
        """What became of each drafter's guesses since the engine started; empty before the first round."""
        return self._requests.speculation_totals()

    def metrics(self) -> Exposition:
        """What the telemetry sinks expose that can be scraped, `prometheus` say, as one page. From any thread; it does
        not wait for the step that runs. Raises `ConfigError` where no sink exposes metrics, `PluginError` where one
        raises, all were switched off or their pages make none together, `RequestError` after `shutdown`."""
        self.use.check_process()
        return self._telemetry.exposition(self._requests, self.exchange.statistics, is_asleep=self.regions.is_asleep)

    def keep_ended(self, most: int) -> None:
        """`explain_request` knows so many requests after their end; 0, as at the start: none."""
        self._telemetry.ended.most = most

    def explain_request(self, request_id: str) -> RequestReports:
        """See `EngineClient.explain_request`. From any thread; it does not wait for the step that runs."""
        self.use.check_process()
        return reports_of(request_id, self._requests.entries(), self._telemetry.ended)

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Stops workers and sinks. Idempotent; pending requests are dropped.

        While a step runs in another thread, this waits for its end, at most `timeout_s` seconds. Then workers that are
        processes are ended all the same, and the step raises `WorkerError`. A step in this process cannot be ended:
        a warning is logged, and the engine is closed when the step has come to its end.
        """
        if not self.use.is_in_this_process or self._closed:
            return
        self.use.share()
        if not self.use.acquire(timeout_s) and not self._interrupt():
            logger.warning("a step still runs here and cannot be ended: the engine is closed when it is done")
            threading.Thread(target=self._close_in_turn, name="dovetail-shutdown", daemon=True).start()
            return
        try:
            self._close()
        finally:
            self.use.release()

    @property
    def is_closed(self) -> bool:
        """Whether it was shut down and all is stopped."""
        return self._closed

    def _interrupt(self) -> bool:
        """Ends the step that another thread runs, and enters; False where that cannot be."""
        executor = self._parts.executor
        if executor.is_interruptible:
            executor.shutdown()
        return executor.is_interruptible and self.use.acquire(SHUTDOWN_S)

    def _close_in_turn(self) -> None:
        with self.use:
            self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._holds.notify()
            self._idle_memory.close()
            self._telemetry.close()
            self.exchange.close()
            self._parts.grammars.close()
            self._adapters.close()
            self._parts.executor.shutdown()

    def _wait_for_grammar(self, sequences: list[Sequence]) -> GrammarWait | None:
        """A new request is held until its grammar is compiled."""
        grammar, compiler = sequences[0].grammar, self._parts.grammars.compiler
        if grammar is None or compiler is None:
            return None
        was_compiled = compiler.has(grammar.spec)
        return self._pending_grammars.hold(sequences, compiler.compile(grammar.spec), was_compiled=was_compiled)

    def _take_news(self, update: StepUpdate) -> None:
        """Applies what was asked or became ready since the last step. Requests whose grammar or adapter is refused
        end."""
        if self._holds.asked:
            self._holds.apply(self._requests.sequences)
        if self._pending_grammars.landed:
            for request_id, error in self._pending_grammars.take():
                self.end_requests([request_id], Ending("error", GRAMMAR_REFUSED, error), update)
        if self._adapters.has_news:
            for request_id, error in self._adapters.take(self._adapt):
                self.end_requests([request_id], Ending("error", error=error), update)
        self.exchange.tick()

    def _adapt(self, sequence: Sequence, adapter: Adapter, cache_salt: str | None) -> None:
        seed = prefix_seed(self._weights.pages, adapter.digest, cache_salt)
        sequence.take_adapter(adapter, seed, draft_blocks(self.config, sequence.drafter, seed))

    def _note_rest(self) -> None:
        self.pausing.note_ends()
        self.exchange.flush()
        self.kv_events.publish()
        if not self._core.has_work:
            self._idle_memory.rest()

    def _create_core(self) -> EngineCore:
        parts = self._parts
        # How many tokens a request with drafts gets is known only when they are judged.
        max_in_flight = parts.executor.max_in_flight if self.config.speculation is None else 1
        return EngineCore(
            parts.scheduler,
            self.config.limits,
            parts.kv,
            parts.executor,
            max_in_flight,
            self._adapters.slots,
            num_stages=parts.executor.need.pipeline_parallel,
        )

    def end_requests(self, request_ids: list[str], ending: Ending, update: StepUpdate) -> None:
        """Ends those of `request_ids` that are known. Errors of the scheduler are raised when all have ended."""
        if any(request_id in self._requests for request_id in request_ids):
            self.steps.requests_ended()
        errors = []
        for request_id in request_ids:
            try:
                # The first last: siblings that wait for its prompt would otherwise enter the queue.
                self._core.finish_all(reversed(self._requests.sequences(request_id)))
            except BaseException as error:
                errors.append(error)
            self._requests.end(request_id, ending, time.monotonic(), update)
        if errors:
            raise errors[0]

    def _assigned(
        self, request_id: str, processed: ProcessedInput, user: str | None
    ) -> tuple[ProcessedInput, Assignment | None]:
        """The request as its arm wants it, where it takes part in an experiment."""
        chosen = self._experiments.choose(request_id, processed.params, user) if self._experiments is not None else None
        if chosen is None:
            return processed, None
        assignment = chosen.assignment(self._core.num_running, self._requests)
        return replace(processed, drafter=chosen.arm.drafter), assignment

    def _create_sequences(
        self,
        request_id: str,
        processed: ProcessedInput,
        priority: int,
        arrival: float,
        cache_salt: str | None,
        known: KnownAdapter | None,
    ) -> list[Sequence]:
        if not self.pausing.is_paused:
            self.check_generates(processed.drafter)
        params = processed.params
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        adapter = known.adapter if known is not None else None
        hash_seed = prefix_seed(self._weights.pages, adapter.digest if adapter is not None else None, cache_salt)
        drafter = self._idle_drafters.drafter_for(processed.drafter, self._core.idle_drafters)
        blocks = draft_blocks(self.config, drafter, hash_seed)
        return [
            Sequence(
                next(self._seq_ids),
                request_id,
                processed.token_ids,
                params,
                priority=priority,
                arrival_time=arrival,
                hash_seed=hash_seed,
                max_total_tokens=processed.max_total_tokens,
                stop_ids=processed.stop_ids,
                eos_token_ids=processed.eos_token_ids,
                seed=(seed + index * _SIBLING_STRIDE) & _SEED_MASK,
                drafter=drafter,
                draft_blocks=blocks,
                grammar=processed.grammar,
                prediction=processed.prediction,
                token_types=processed.token_types,
                adapter=adapter,
                pooling=processed.pooling,
                needs_every_state=processed.needs_every_state,
            )
            for index in range(params.num_sequences)
        ]
