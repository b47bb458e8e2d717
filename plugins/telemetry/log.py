"""Telemetry sink `log`: one line of throughput and memory every few seconds, through logging."""

from __future__ import annotations

import logging
from typing import ClassVar

from pydantic import Field

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.telemetry import StepStats, TelemetrySink

logger = logging.getLogger(__name__)


class LogOptions(PluginOptions):
    """Options of `log`."""

    interval_s: float = Field(default=10.0, gt=0, description="Seconds between two lines, while the engine works.")


class LogSink(TelemetrySink):
    """Logs, at level INFO, what happened since the last line."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options: ClassVar[type[PluginOptions]] = LogOptions

    def __init__(self, options: LogOptions):
        super().__init__(options)
        self._interval = options.interval_s
        self._since: float | None = None
        self._num_prompt = self._num_generated = self._num_preempted = 0
        self._num_drafted = self._num_accepted = 0

    def on_step(self, stats: StepStats) -> None:
        """Counts, and writes a line when the interval is over."""
        if self._since is None:
            self._since = stats.time - stats.duration
        self._num_prompt += stats.num_prompt_tokens
        self._num_generated += stats.num_generated_tokens
        self._num_preempted += stats.num_preempted
        self._num_drafted += stats.num_drafted
        self._num_accepted += stats.num_accepted
        seconds = stats.time - self._since
        if seconds < self._interval:
            return
        looked_up = stats.prefix_query_tokens
        logger.info(
            "prompt %.1f tok/s, generated %.1f tok/s, running %d, waiting %d, preempted %d, KV blocks %d of %d used,"
            " prefix hits %.1f%%%s",
            self._num_prompt / seconds,
            self._num_generated / seconds,
            stats.num_running,
            stats.num_waiting,
            self._num_preempted,
            stats.kv_blocks_used,
            stats.kv_blocks_total,
            100 * stats.prefix_hit_tokens / looked_up if looked_up else 0.0,
            f", drafts accepted {self._num_accepted} of {self._num_drafted}" if self._num_drafted else "",
        )
        self._since = stats.time
        self._num_prompt = self._num_generated = self._num_preempted = 0
        self._num_drafted = self._num_accepted = 0
