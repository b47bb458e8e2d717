"""Counts what `get_metrics` reports, from what telemetry sinks are given."""

from __future__ import annotations

from collections import Counter as Tally
from typing import Protocol

from dovetail.contracts.outputs import SpeculationTotals
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.telemetry import RequestStats, StepStats, TelemetrySink
from dovetail.vllm.v1.metrics.reader import Counter, Gauge, Histogram, Metric, Vector

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0)


class CountsSpeculation(Protocol):
    """The part of an engine that is asked."""

    def speculation_totals(self) -> dict[str, SpeculationTotals]:
        """What became of each drafter's guesses."""


class _Observations:
    def __init__(self, name: str, bounds: tuple[float, ...]):
        self._name = name
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._count, self._sum = 0, 0.0

    def observe(self, value: float) -> None:
        """Adds one observation."""
        self._count += 1
        self._sum += value
        for index, bound in enumerate(self._bounds):
            self._counts[index] += value <= bound

    def metric(self) -> Histogram:
        """Returns the metric in vLLM's form."""
        buckets = {str(bound): count for bound, count in zip(self._bounds, self._counts, strict=True)}
        return Histogram(self._name, {}, self._count, self._sum, {**buckets, "+Inf": self._count})


class MetricsSink(TelemetrySink):
    """vLLM's counters, gauges and histograms of one engine."""

    contract = (1, 0)

    def __init__(self, engine: CountsSpeculation):
        super().__init__(PluginOptions())
        self._engine = engine
        self._last: StepStats | None = None
        self._prompt_tokens = self._generated_tokens = self._preemptions = 0
        self._finished: Tally[str] = Tally()
        self._first_token = _Observations("vllm:time_to_first_token_seconds", _SECONDS)
        self._per_token = _Observations("vllm:time_per_output_token_seconds", _SECONDS)
        self._queued = _Observations("vllm:request_queue_time_seconds", _SECONDS)
        self._whole = _Observations("vllm:e2e_request_latency_seconds", _SECONDS)
        self._request_prompt = _Observations("vllm:request_prompt_tokens", _TOKENS)
        self._request_output = _Observations("vllm:request_generation_tokens", _TOKENS)

    def on_step(self, stats: StepStats) -> None:
        """Counts a step."""
        self._last = stats
        self._prompt_tokens += stats.num_prompt_tokens
        self._generated_tokens += stats.num_generated_tokens
        self._preemptions += stats.num_preempted

    def on_request(self, stats: RequestStats) -> None:
        """Counts a request that ended."""
        self._finished[stats.finish_reason] += 1
        self._whole.observe(stats.finish_time - stats.arrival_time)
        if stats.first_scheduled_time is not None:
            self._queued.observe(stats.first_scheduled_time - stats.arrival_time)
        self._request_prompt.observe(stats.num_prompt_tokens)
        self._request_output.observe(stats.num_generated_tokens)
        if stats.first_token_time is not None:
            self._first_token.observe(stats.first_token_time - stats.arrival_time)
            if stats.num_generated_tokens > 1:
                seconds = stats.finish_time - stats.first_token_time
                self._per_token.observe(seconds / (stats.num_generated_tokens - 1))

    def metrics(self) -> list[Metric]:
        """All of it, under vLLM's names."""
        last = self._last
        used = last.kv_blocks_used / last.kv_blocks_total if last is not None and last.kv_blocks_total else 0.0
        return [
            Gauge("vllm:num_requests_running", {}, float(last.num_running) if last is not None else 0.0),
            Gauge("vllm:num_requests_waiting", {}, float(last.num_waiting) if last is not None else 0.0),
            Gauge("vllm:kv_cache_usage_perc", {}, used),
            Counter("vllm:prefix_cache_queries", {}, last.prefix_query_tokens if last is not None else 0),
            Counter("vllm:prefix_cache_hits", {}, last.prefix_hit_tokens if last is not None else 0),
            Counter("vllm:num_preemptions", {}, self._preemptions),
            Counter("vllm:prompt_tokens", {}, self._prompt_tokens),
            Counter("vllm:generation_tokens", {}, self._generated_tokens),
            *(
                Counter("vllm:request_success", {"finished_reason": reason}, count)
                for reason, count in sorted(self._finished.items())
            ),
            *self._speculation(),
            *(
                observed.metric()
                for observed in (
                    self._first_token,
                    self._per_token,
                    self._queued,
                    self._whole,
                    self._request_prompt,
                    self._request_output,
                )
            ),
        ]

    def _speculation(self) -> list[Metric]:
        metrics: list[Metric] = []
        for drafter, totals in sorted(self._engine.speculation_totals().items()):
            labels = {"drafter": drafter}
            metrics += [
                Counter("vllm:spec_decode_num_drafts", labels, totals.num_draft_rounds),
                Counter("vllm:spec_decode_num_draft_tokens", labels, totals.num_drafted),
                Counter("vllm:spec_decode_num_accepted_tokens", labels, totals.num_accepted),
                Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, list(totals.accepted_per_position)),
            ]
        return metrics
