"""Adds up tokens, exposes the sums, and writes them when the engine shuts down."""

from pathlib import Path
from typing import Any

from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.telemetry import EngineDescription, EngineState, Exposes, Exposition, RequestStats, StepStats


class Options(PluginOptions):
    path: Path


class Frozen(Exposes):
    contract = (1, 0)
    Options = Options

    @classmethod
    def check(cls, need: Any, options: Options, environment: Environment) -> list[str]:
        return [] if options.path.parent.is_dir() else [f"there is no folder {options.path.parent}"]

    def __init__(self, options: Options):
        super().__init__(options)
        self._num_computed = self._num_generated = self._num_requests = 0
        self._seconds = 0.0

    def on_start(self, engine: EngineDescription) -> None:
        self._label = f'{{block_size="{engine.block_size}"}}'

    def on_step(self, stats: StepStats) -> None:
        self._num_computed += stats.num_prompt_tokens
        self._seconds += stats.duration + stats.times.forward

    def on_request(self, stats: RequestStats) -> None:
        self._num_requests += 1
        self._num_generated += stats.num_generated_tokens

    def exposition(self, state: EngineState) -> Exposition:
        lines = [
            "# TYPE frozen_tokens_total counter",
            f"frozen_tokens_total{self._label} {self._num_generated}",
            "# TYPE frozen_running gauge",
            f"frozen_running{self._label} {state.num_running}",
        ]
        return Exposition(content_type="text/plain; version=0.0.4", body="\n".join([*lines, ""]).encode())

    def close(self) -> None:
        self.options.path.write_text(f"{self._num_requests} {self._num_computed} {self._num_generated}")
