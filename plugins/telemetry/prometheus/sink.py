"""Telemetry sink `prometheus`: counts for Prometheus under vLLM's names and OpenTelemetry's.

One thread counts, the engine's; any may render. Nothing is global: each engine has counts of its own.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.telemetry import EngineDescription, EngineState, Exposes, Exposition, RequestStats, StepStats
from dovetail.plugins.telemetry.prometheus import names
from dovetail.plugins.telemetry.prometheus.arms import MAX_ARMS, Arms
from dovetail.plugins.telemetry.prometheus.exposition import Counted, Writer
from dovetail.plugins.telemetry.prometheus.histogram import Histogram
from dovetail.plugins.telemetry.prometheus.page import CONTENT_TYPE


class PrometheusOptions(PluginOptions):
    """Options of `prometheus`."""

    model_name: str | None = Field(default=None, description="Label model_name; by default the config's model.path.")
    engine: str = Field(default="0", description="Label engine, which tells engines of one deployment apart.")


class PrometheusSink(Exposes):
    """Counts a step and a request in constant time each."""

    contract: ClassVar[tuple[int, int]] = (1, 6)
    Options: ClassVar[type[PluginOptions]] = PrometheusOptions

    def __init__(self, options: PrometheusOptions):
        super().__init__(options)
        self._options = options
        self._counted: Counted | None = None
        self._last_step_time: float | None = None

    def on_start(self, engine: EngineDescription) -> None:
        """Begins to count; goes on where the KV memory was replaced."""
        if self._counted is None:
            first = (engine.drafter or "", "", "0", "", "")
            num_assigned = sum(len(experiment.arms) for experiment in engine.experiments)
            arms = Arms(engine.max_model_len, first, MAX_ARMS + num_assigned)
            self._counted = Counted(
                arms,
                step_tokens=Histogram(names.STEP_TOKENS.bounds),
                step_durations=Histogram(names.STEP_DURATION.bounds),
                inter_token=Histogram(names.INTER_TOKEN.bounds),
            )
        model_name = self._options.model_name if self._options.model_name is not None else engine.model
        self._writer = Writer(self._counted, engine, model_name, self._options.engine)

    def on_step(self, stats: StepStats) -> None:
        """Counts a step."""
        counted = self._counted
        assert counted is not None  # on_start came first
        counted.prompt_tokens += stats.num_prompt_tokens
        counted.generated_tokens += stats.num_generated_tokens
        counted.preemptions += stats.num_preempted
        counted.step_tokens.observe(stats.num_prompt_tokens + stats.num_generated_tokens)
        counted.step_durations.observe(stats.duration)
        if stats.num_decoded:
            # All of these waited since the step before: one observation with a weight.
            since = self._last_step_time if self._last_step_time is not None else stats.time - stats.duration
            counted.inter_token.observe(stats.time - since, stats.num_decoded)
        self._last_step_time = stats.time
        for first in stats.first_tokens:
            counted.arms.of(first).first_token(first.latency)

    def on_request(self, stats: RequestStats) -> None:
        """Counts a request."""
        assert self._counted is not None
        self._counted.arms.of(stats).request(stats)

    def exposition(self, state: EngineState) -> Exposition:
        """Renders what was counted, in Prometheus' text format."""
        return Exposition(content_type=CONTENT_TYPE, body=self._writer.write(state))
