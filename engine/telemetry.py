"""Reports to sinks what was measured, and to hooks what happened to the engine. A sink that raises is reported once and
switched off; the seconds that each takes are counted.

All of it happens in the thread that is in the engine, except `exposition`, which any thread may call at any time: it
reads values that are replaced as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.errors import ConfigError, PluginError, RequestError
from dovetail.contracts.executor import Executor
from dovetail.contracts.hooks import RequestControl
from dovetail.contracts.router import CacheEvent
from dovetail.contracts.telemetry import (
    ConnectorTotals,
    DrafterTotals,
    EngineDescription,
    EngineState,
    Exposes,
    Exposition,
    FirstToken,
    FollowsCache,
    RankState,
    SinkTotals,
    StepStats,
    TelemetrySink,
)
from dovetail.contracts.weight_transport import WeightsReport
from dovetail.engine.core import EngineCore
from dovetail.engine.exposition import joined
from dovetail.engine.external.blocks import ExternalStatistics
from dovetail.engine.hooks import HookCaller
from dovetail.engine.kv.manager import KVCacheManager
from dovetail.engine.request_reports import EndedRequests, request_stats
from dovetail.engine.request_table import RequestEntry, RequestTable
from dovetail.engine.step import Step
from dovetail.registry.calls import calling
from dovetail.worker.kv_layout import stage_block_bytes

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Listener:
    """A sink and what it has cost."""

    sink: TelemetrySink
    name: str
    seconds: float = 0.0
    is_on: bool = True


class Telemetry:
    """Fans measurements out."""

    def __init__(self, config: ResolvedConfig, sinks: Iterable[TelemetrySink], hooks: HookCaller, executor: Executor):
        self._config = config
        self._executor = executor
        self._hooks = hooks
        self._listeners: list[_Listener] = []
        for component, sink in zip(config.telemetry, sinks, strict=True):
            name = component.name.rpartition(":")[2]  # of ./file.py:Class the class
            self._listeners.append(_Listener(sink, self._free_name(name)))
        self.listening = tuple(self._listeners)
        """Those that have not raised; where there are none, steps need not be told of."""
        self.ended = EndedRequests()
        """Requests that ended, for those who ask about one."""
        self._first_tokens: list[FirstToken] = []
        """Of the step that is reported next."""
        self._weights = WeightsReport(version=0, checksum="")
        self._is_closed = False

    def attach(self, core: EngineCore, kv: KVCacheManager) -> None:
        """What is measured; called again where the KV memory is replaced."""
        self._core, self._kv = core, kv
        self._note_load()
        engine = self._description()
        self._tell(lambda sink: sink.on_start(engine))

    def kv_listeners(self) -> list[Callable[[Sequence[CacheEvent]], None]]:
        """What takes KV events for the sinks that follow them."""
        return [listener for each in self._listeners for listener in self._kv_listeners(each)]

    def add_sink(self, sink: TelemetrySink) -> list[Callable[[Sequence[CacheEvent]], None]]:
        """One more listener, told of what happens from now on. Returns what takes KV events for it."""
        listener = _Listener(sink, self._free_name(type(sink).__name__))
        self._listeners = [*self._listeners, listener]
        self.listening = (*self.listening, listener)
        engine = self._description()
        self._call(listener, lambda sink: sink.on_start(engine))
        return self._kv_listeners(listener)

    def engine_started(self, control: RequestControl) -> None:
        """The engine is ready."""
        chosen = {path: component.reference for path, component in self._config.components_by_path().items()}
        self._hooks.call("dovetail_engine_started", config=dict(self._config.values), plugins=chosen, control=control)

    def request_added(self, entry: RequestEntry, control: RequestControl) -> None:
        """A request was queued."""
        if self.listening:
            self._note_load()
        self._hooks.call("dovetail_request_added", request_id=entry.request_id, params=entry.params, control=control)

    def weights_changed(self, weights: WeightsReport) -> None:
        """The weights were replaced by these."""
        self._weights = weights
        self._hooks.call("dovetail_weights_changed", version=weights.version)

    def first_token(self, entry: RequestEntry, now: float) -> None:
        """A request got its first token in the step that is reported next."""
        if self.listening:
            metrics = entry.metrics
            self._first_tokens.append(
                FirstToken(
                    latency=now - metrics.arrival_time,
                    drafter=metrics.drafter,
                    adapter=entry.adapter,
                    weight_version=entry.weight_version,
                    assignment=entry.assignment,
                )
            )

    def step_done(self, step: Step) -> None:
        """A step's tokens are committed, and the requests that it ended were reported."""
        first_tokens, self._first_tokens = tuple(self._first_tokens), []
        self._note_load()
        stats = self._step_stats(step, first_tokens)
        self._tell(lambda sink: sink.on_step(stats))

    def request_finished(self, entry: RequestEntry) -> None:
        """A request ended, in a step or between two."""
        if not (self.listening or self.ended.most):
            return
        stats = request_stats(entry)
        if self.ended.most:
            self.ended.add(stats)
        if self.listening:
            self._tell(lambda sink: sink.on_request(stats))
            self._note_load()

    def exposition(
        self, requests: RequestTable, connector: ExternalStatistics | None, *, is_asleep: bool
    ) -> Exposition:
        """What all sinks expose that can and have not raised. Raises `ConfigError` where no sink can, `PluginError`
        where all that can were switched off, one raises now or they make no page together, `RequestError` after
        `close`."""
        exposing = [(each, each.sink) for each in self._listeners if isinstance(each.sink, Exposes)]
        if not exposing:
            raise ConfigError(
                "no telemetry sink of this engine exposes metrics: add one to the section `telemetry`, as in"
                " telemetry: [prometheus]"
            )
        if self._is_closed:
            raise RequestError("the engine is shut down: there are no metrics any more")
        working = [(listener.name, sink) for listener, sink in exposing if listener.is_on]
        if not working:
            names = ", ".join(listener.name for listener, _ in exposing)
            raise PluginError(f"telemetry sink {names} raised and was switched off: the log has its error")
        state = self._state(requests, connector, is_asleep)
        return joined({name: _rendered(name, sink, state) for name, sink in working})

    def close(self) -> None:
        """The engine shuts down."""
        self._tell(lambda sink: sink.close())
        self._is_closed = True
        self.listening = ()
        self._hooks.call("dovetail_engine_stopped")

    def _kv_listeners(self, listener: _Listener) -> list[Callable[[Sequence[CacheEvent]], None]]:
        sink = listener.sink
        if not isinstance(sink, FollowsCache):
            return []

        def take(events: Sequence[CacheEvent]) -> None:
            if listener.is_on and not self._is_closed:
                self._call(listener, lambda _: sink.on_kv_events(events))

        return [take]

    def _tell(self, call: Callable[[TelemetrySink], None]) -> None:
        for listener in self.listening:
            self._call(listener, call)

    def _call(self, listener: _Listener, call: Callable[[TelemetrySink], None]) -> None:
        started = time.perf_counter()
        try:
            call(listener.sink)
        except Exception:
            logger.exception("telemetry sink %s raised and is switched off", listener.name)
            self._switch_off(listener)
        listener.seconds += time.perf_counter() - started

    def _switch_off(self, listener: _Listener) -> None:
        listener.is_on = False
        self.listening = tuple(each for each in self.listening if each is not listener)
        with contextlib.suppress(Exception):  # one report is enough
            listener.sink.close()

    def _free_name(self, name: str) -> str:
        taken = sum(listener.name.partition("#")[0] == name for listener in self._listeners)
        return f"{name}#{taken + 1}" if taken else name

    def _note_load(self) -> None:
        """Other threads read the numbers that held when the engine last changed them."""
        self._load = self._core.num_running, self._core.num_waiting

    def _description(self) -> EngineDescription:
        config, kv = self._config, self._kv.statistics()
        return EngineDescription(
            model=str(config.values["model"]["path"]),
            max_model_len=config.model.max_model_len,
            block_size=config.cache.block_size,
            num_blocks=kv.num_blocks,
            num_host_blocks=kv.num_host_blocks,
            prefix_caching=config.cache.prefix_caching,
            kv_dtype=config.cache.dtype,
            drafter=config.speculation.default if config.speculation is not None else None,
            experiments=config.experiments,
            max_loras=config.lora.max_loras if config.lora is not None else 0,
        )

    def _state(self, requests: RequestTable, connector: ExternalStatistics | None, is_asleep: bool) -> EngineState:
        kv = self._kv.statistics()
        num_running, num_waiting = self._load
        running_adapters, waiting_adapters = requests.adapters()
        return EngineState(
            num_running=num_running,
            num_waiting=num_waiting,
            kv_blocks_used=kv.num_used_blocks,
            kv_blocks_total=kv.num_blocks,
            prefix_query_tokens=kv.prefix_query_tokens,
            prefix_hit_tokens=kv.prefix_hit_tokens,
            external_hit_tokens=connector.num_hit_tokens if connector is not None else 0,
            external_query_tokens=connector.num_query_tokens if connector is not None else 0,
            connector=_connector_totals(connector) if connector is not None else None,
            weight_version=self._weights.version,
            weight_checksum=self._weights.checksum,
            is_asleep=is_asleep,
            drafters={
                drafter: DrafterTotals(
                    num_draft_rounds=sums.num_draft_rounds,
                    num_drafted=sums.num_drafted,
                    num_accepted=sums.num_accepted,
                    accepted_per_position=tuple(sums.accepted_per_position),
                    num_errors=sums.num_drafter_errors,
                )
                for drafter, sums in requests.speculation_totals().items()
            },
            sinks=tuple(
                SinkTotals(name=listener.name, seconds=listener.seconds, is_on=listener.is_on)
                for listener in self._listeners
            ),
            running_adapters=running_adapters,
            waiting_adapters=waiting_adapters,
            ranks=self._ranks(kv.num_blocks),
        )

    def _ranks(self, num_blocks: int) -> tuple[RankState, ...]:
        with calling(f"executor {self._config.executor.name!r}", "rank_status"):
            found = self._executor.rank_status()
        stages = stage_block_bytes(self._kv.layout)
        return tuple(RankState(status=one, kv_bytes=num_blocks * stages[one.stage]) for one in found)

    def _step_stats(self, step: Step, first_tokens: tuple[FirstToken, ...]) -> StepStats:
        result, kv = step.result, self._kv.statistics()
        counts = result.counts
        num_rows = len(step.schedule.requests) if counts is None else len(counts) - counts.count(0)
        return StepStats(
            step_id=result.step_id,
            time=step.ended,
            duration=step.ended - step.started,
            num_running=self._load[0],
            num_waiting=self._load[1],
            num_prompt_tokens=step.num_prompt_tokens,
            num_generated_tokens=len(result.token_ids),
            num_preempted=len(step.schedule.preempted),
            num_drafted=sum(counts.drafted for counts in result.draft_counts.values()),
            num_accepted=sum(counts.accepted for counts in result.draft_counts.values()),
            kv_blocks_used=kv.num_used_blocks,
            kv_blocks_total=kv.num_blocks,
            prefix_query_tokens=kv.prefix_query_tokens,
            prefix_hit_tokens=kv.prefix_hit_tokens,
            times=result.times,
            num_draft_rounds=len(result.draft_counts),
            num_decoded=max(0, min(num_rows, len(result.token_ids)) - len(step.first_tokens)),
            first_tokens=first_tokens,
        )


def _connector_totals(counts: ExternalStatistics) -> ConnectorTotals:
    return ConnectorTotals(
        is_on=counts.is_on,
        num_saved_blocks=counts.num_saved_blocks,
        num_loaded_blocks=counts.num_loaded_blocks,
        num_dropped_blocks=counts.num_dropped_blocks,
        num_failures=counts.num_failures,
        num_corrupt=counts.num_corrupt,
        num_timeouts=counts.num_timeouts,
    )


def _rendered(name: str, sink: Exposes, state: EngineState) -> Exposition:
    try:
        return sink.exposition(state)
    except Exception as error:
        raise PluginError(
            f"telemetry sink {name} cannot render its metrics: {type(error).__name__}: {error}"
        ) from error
