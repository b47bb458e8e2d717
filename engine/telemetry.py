"""Tells sinks what was measured, and hooks what happened to the engine. One that raises is reported once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.hooks import RequestControl
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.telemetry import RequestStats, StepStats, TelemetrySink
from dovetail.engine.kv.manager import KVCacheManager
from dovetail.engine.request_table import RequestEntry
from dovetail.engine.step import Step
from dovetail.registry.hooks import HookCaller

logger = logging.getLogger(__name__)


class Telemetry:
    """Fans measurements out."""

    def __init__(self, sinks: list[TelemetrySink], hooks: HookCaller, kv: KVCacheManager):
        self.sinks = sinks
        """Those that listen; where there is none, steps need not be told of."""
        self._hooks = hooks
        self._kv = kv

    def add_sink(self, sink: TelemetrySink) -> None:
        """One more listener, told of what happens from now on."""
        self.sinks.append(sink)

    def engine_started(self, config: ResolvedConfig, control: RequestControl) -> None:
        """The engine is ready."""
        chosen = {path: component.reference for path, component in config.components_by_path().items()}
        self._hooks.call("dovetail_engine_started", config=dict(config.values), plugins=chosen, control=control)

    def request_added(self, request_id: str, params: SamplingParams, control: RequestControl) -> None:
        """A request was queued."""
        self._hooks.call("dovetail_request_added", request_id=request_id, params=params, control=control)

    def weights_changed(self, version: int) -> None:
        """The weights were replaced, so many times by now."""
        self._hooks.call("dovetail_weights_changed", version=version)

    def step_done(self, step: Step, num_running: int, num_waiting: int) -> None:
        """A step's tokens are committed."""
        stats = self._step_stats(step, num_running, num_waiting)
        self._tell(lambda sink: sink.on_step(stats))

    def request_finished(self, entry: RequestEntry) -> None:
        """A request ended."""
        if self.sinks:
            stats = _request_stats(entry)
            self._tell(lambda sink: sink.on_request(stats))

    def close(self) -> None:
        """The engine shuts down."""
        self._tell(lambda sink: sink.close())
        self.sinks = []
        self._hooks.call("dovetail_engine_stopped")

    def _tell(self, call: Callable[[TelemetrySink], None]) -> None:
        for sink in list(self.sinks):
            try:
                call(sink)
            except Exception:
                logger.exception("telemetry sink %s raised and is switched off", type(sink).__name__)
                self.sinks.remove(sink)
                with contextlib.suppress(Exception):  # one report is enough
                    sink.close()

    def _step_stats(self, step: Step, num_running: int, num_waiting: int) -> StepStats:
        result, kv = step.result, self._kv.statistics()
        return StepStats(
            step_id=result.step_id,
            time=step.ended,
            duration=step.ended - step.started,
            num_running=num_running,
            num_waiting=num_waiting,
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
        )


def _request_stats(entry: RequestEntry) -> RequestStats:
    metrics = entry.metrics
    return RequestStats(
        request_id=entry.request_id,
        arrival_time=metrics.arrival_time,
        first_scheduled_time=metrics.first_scheduled_time or metrics.arrival_time,
        first_token_time=metrics.first_token_time,
        finish_time=metrics.finished_time or metrics.arrival_time,
        finish_reason=entry.finish_reason,
        num_prompt_tokens=entry.num_prompt_tokens,
        num_cached_tokens=metrics.num_cached_tokens,
        num_generated_tokens=metrics.num_generated_tokens,
        num_preemptions=metrics.num_preemptions,
        drafter=metrics.drafter,
        num_draft_rounds=metrics.num_draft_rounds,
        num_drafted=metrics.num_drafted,
        num_accepted=metrics.num_accepted,
        drafted_per_position=tuple(metrics.drafted_per_position),
        accepted_per_position=tuple(metrics.accepted_per_position),
        drafter_error=metrics.drafter_error,
    )
