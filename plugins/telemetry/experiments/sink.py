"""The sink: a line for each experiment when the engine starts, and one for each of its requests that ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.telemetry import (
    Assignment,
    EngineDescription,
    ExperimentDescription,
    RequestStats,
    TelemetrySink,
)
from dovetail.plugins.telemetry.experiments.writer import LineWriter


class ExperimentsOptions(PluginOptions):
    """Options of `experiments`."""

    path: Path = Field(description="File to append to, for `dovetail ab live`; its folder must exist.")
    queue_size: int = Field(default=65536, ge=1, description="Lines that wait to be written; further ones are lost.")
    flush_s: float = Field(default=5.0, ge=0, description="How long the engine's end waits for what is unwritten.")


class ExperimentsSink(TelemetrySink):
    """Writes "event": "experiment", with the fields of `ExperimentDescription`, and "event": "request"; requests that
    take part in no experiment are passed over."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options: ClassVar[type[PluginOptions]] = ExperimentsOptions

    @classmethod
    def check(cls, need: Any, options: Any, environment: Environment) -> list[str]:
        """The file's folder must be there."""
        folder = options.path.absolute().parent
        return [] if folder.is_dir() else [f"there is no folder {folder}: create it, or give another path"]

    def __init__(self, options: ExperimentsOptions):
        super().__init__(options)
        self._flush_s = options.flush_s
        self._designs: dict[str, str] = {}
        """By experiment, what tells its design from others of that name."""
        try:
            self._lines = LineWriter(options.path, options.queue_size)
        except OSError as error:
            raise ConfigError(
                f"telemetry sink experiments cannot write to {options.path} ({error.strerror}): give another path"
            ) from error

    @property
    def num_lost(self) -> int:
        """Lines that could not be written."""
        return self._lines.num_lost

    def on_start(self, engine: EngineDescription) -> None:
        """Writes the experiments, once."""
        for experiment in engine.experiments:
            if experiment.name not in self._designs:
                self._designs[experiment.name] = design = _design_of(experiment)
                line = {"event": "experiment", "design": design, "time": time.time(), **asdict(experiment)}
                self._lines.put(partial(dict, line))

    def on_request(self, stats: RequestStats) -> None:
        """Has the request written."""
        if stats.assignment is not None:
            design = self._designs.get(stats.assignment.experiment, "")
            self._lines.put(partial(record_of, stats, stats.assignment, design, time.time()))

    def close(self) -> None:
        """Waits for what is unwritten, `flush_s` seconds at most."""
        self._lines.close(self._flush_s)


def _design_of(experiment: ExperimentDescription) -> str:
    return blake2b(repr(experiment).encode(), digest_size=4).hexdigest()


def record_of(stats: RequestStats, assignment: Assignment, design: str, now: float) -> Mapping[str, Any]:
    """The record of a request that ended at `now`, in seconds since 1970; other times are seconds."""
    arrival, first, scheduled = stats.arrival_time, stats.first_token_time, stats.first_scheduled_time
    return {
        "event": "request",
        "design": design,
        "time": round(now - (stats.finish_time - arrival), 6),
        "experiment": assignment.experiment,
        "arm": assignment.arm,
        "unit": assignment.unit_hash,
        "slice": assignment.slice,
        "num_running": assignment.num_running,
        "num_others": assignment.num_others,
        "finish_reason": stats.finish_reason,
        "queue": _rounded(scheduled, arrival),
        "ttft": _rounded(first, arrival),
        "decode": _rounded(stats.finish_time, first),
        "e2e": _rounded(stats.finish_time, arrival),
        "prompt_tokens": stats.num_prompt_tokens,
        "cached_tokens": stats.num_cached_tokens,
        "output_tokens": stats.num_generated_tokens,
        "n": stats.n,
        "preemptions": stats.num_preemptions,
        "drafter": stats.drafter,
        "rounds": stats.num_draft_rounds,
        "drafted": stats.num_drafted,
        "accepted": stats.num_accepted,
        "drafter_error": stats.drafter_error is not None,
        "weight_version": stats.weight_version,
    }


def _rounded(end: float | None, begin: float | None) -> float | None:
    """Seconds between two times, where both are known; microseconds suffice."""
    return None if end is None or begin is None else round(end - begin, 6)
