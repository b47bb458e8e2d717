"""What is counted of requests, apart for each drafter, adapter, weight version and arm of an experiment, so that these
can be compared."""

from __future__ import annotations

from dovetail.contracts.telemetry import FirstToken, RequestStats
from dovetail.plugins.telemetry.prometheus import names
from dovetail.plugins.telemetry.prometheus.histogram import Histogram
from dovetail.plugins.telemetry.prometheus.names import Definition

ArmLabels = tuple[str, str, str, str, str]
"""Drafter, adapter, weight version, experiment and its arm; "" for none."""
FINISH_REASONS = ("stop", "length", "abort", "error")
MAX_ARMS = 16
"""Arms that are kept besides those of experiments; each takes some 30 KB of exposition."""
MAX_ERROR_TYPES = 16


def labels_of(stats: RequestStats | FirstToken) -> ArmLabels:
    """The arm that a request belongs to."""
    assignment = stats.assignment
    experiment, arm = ("", "") if assignment is None else (assignment.experiment, assignment.arm)
    return stats.drafter or "", stats.adapter, str(stats.weight_version), experiment, arm


class Arm:
    """The requests with the same labels."""

    def __init__(self, max_model_len: int):
        self._prompt, self._computed, self._output, self._max_tokens = names.token_definitions(max_model_len)
        self.histograms: dict[Definition, Histogram] = {
            definition: Histogram(definition.bounds)
            for definition in (
                *(names.FIRST_TOKEN, names.PER_TOKEN, names.LATENCY, names.QUEUE, names.PREFILL, names.DECODE),
                *(names.INFERENCE, self._prompt, self._computed, self._output, names.COMPLETIONS, self._max_tokens),
            )
        }
        self.gen_ai_histograms = {
            definition: Histogram(definition.bounds)
            for definition in (names.GEN_AI_FIRST_TOKEN, names.GEN_AI_PER_TOKEN)
        }
        self.input_tokens = Histogram(names.GEN_AI_TOKENS.bounds)
        self.output_tokens = Histogram(names.GEN_AI_TOKENS.bounds)
        self.latencies: dict[str, Histogram] = {"": Histogram(names.GEN_AI_LATENCY.bounds)}
        """By type of error; "" for requests that did not fail."""
        self.ended = dict.fromkeys(FINISH_REASONS, 0)
        self.num_drafted = self.num_accepted = 0

    def first_token(self, seconds: float) -> None:
        """A request got its first token."""
        self.histograms[names.FIRST_TOKEN].observe(seconds)
        self.gen_ai_histograms[names.GEN_AI_FIRST_TOKEN].observe(seconds)

    def request(self, stats: RequestStats) -> None:
        """A request ended. The time is the same for all requests."""
        observe, finish = self._observe, stats.finish_time
        self.ended[stats.finish_reason] = self.ended.get(stats.finish_reason, 0) + 1
        self.num_drafted += stats.num_drafted
        self.num_accepted += stats.num_accepted
        latency = finish - stats.arrival_time
        observe(names.LATENCY, latency)
        self._latencies_of(stats.error_type or "").observe(latency)
        observe(self._prompt, stats.num_prompt_tokens)
        observe(self._computed, stats.num_prompt_tokens - stats.num_cached_tokens)
        observe(self._output, stats.num_generated_tokens)
        self.input_tokens.observe(stats.num_prompt_tokens)
        self.output_tokens.observe(stats.num_generated_tokens)
        observe(names.COMPLETIONS, stats.n)
        if stats.max_tokens is not None:
            observe(self._max_tokens, stats.max_tokens)
        scheduled, first = stats.first_scheduled_time, stats.first_token_time
        if scheduled is not None:
            observe(names.QUEUE, scheduled - stats.arrival_time)
            observe(names.INFERENCE, finish - scheduled)
        if scheduled is not None and first is not None:
            observe(names.PREFILL, first - scheduled)
        if first is not None:
            observe(names.DECODE, finish - first)
            # Completions of one prompt run at the same time.
            per_completion = stats.num_generated_tokens / stats.n
            if per_completion > 1:
                seconds = (finish - first) / (per_completion - 1)
                observe(names.PER_TOKEN, seconds)
                self.gen_ai_histograms[names.GEN_AI_PER_TOKEN].observe(seconds)

    def _observe(self, definition: Definition, value: float) -> None:
        self.histograms[definition].observe(value)

    def _latencies_of(self, error_type: str) -> Histogram:
        found = self.latencies.get(error_type)
        if found is None:
            error_type = error_type if len(self.latencies) < MAX_ERROR_TYPES else "_OTHER"
            found = self.latencies.setdefault(error_type, Histogram(names.GEN_AI_LATENCY.bounds))
        return found


class Arms:
    """The arms that were met, at most `most`: what was counted of the one that was met longest ago is dropped for
    another, so that an engine whose weights change for days exposes no more than one that has just started."""

    def __init__(self, max_model_len: int, first: ArmLabels, most: int):
        self._max_model_len = max_model_len
        self._most = most
        self._arms = {first: Arm(max_model_len)}

    def of(self, stats: RequestStats | FirstToken) -> Arm:
        """The arm of a request; it is the one met last from now on."""
        labels = labels_of(stats)
        arm = self._arms.pop(labels, None)
        if arm is None:
            arm = Arm(self._max_model_len)
            if len(self._arms) == self._most:
                del self._arms[next(iter(self._arms))]
        self._arms[labels] = arm
        return arm

    def items(self) -> list[tuple[ArmLabels, Arm]]:
        """A copy, which another thread may read."""
        return sorted(self._arms.items(), key=lambda item: item[0])
