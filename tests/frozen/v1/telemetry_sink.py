"""Adds up tokens and writes the sums when the engine shuts down."""

from pathlib import Path
from typing import Any

from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.telemetry import RequestStats, StepStats, TelemetrySink


class Options(PluginOptions):
    path: Path


class Frozen(TelemetrySink):
    contract = (1, 0)
    Options = Options

    @classmethod
    def check(cls, need: Any, options: Options, environment: Environment) -> list[str]:
        return [] if options.path.parent.is_dir() else [f"there is no folder {options.path.parent}"]

    def __init__(self, options: Options):
        super().__init__(options)
        self._num_computed = self._num_generated = self._num_requests = 0
        self._seconds = 0.0

    def on_step(self, stats: StepStats) -> None:
        self._num_computed += stats.num_prompt_tokens
        self._seconds += stats.duration + stats.times.forward

    def on_request(self, stats: RequestStats) -> None:
        self._num_requests += 1
        self._num_generated += stats.num_generated_tokens

    def close(self) -> None:
        self.options.path.write_text(f"{self._num_requests} {self._num_computed} {self._num_generated}")
