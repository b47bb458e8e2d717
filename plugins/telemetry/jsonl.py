"""Telemetry sink `jsonl`: every step and every request as one JSON line in a file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.telemetry import RequestStats, StepStats, TelemetrySink


class JSONLOptions(PluginOptions):
    """Options of `jsonl`."""

    path: Path = Field(description="File to append to; its folder must exist.")
    steps: bool = Field(default=True, description="Write a line per step too, not only a line per request.")


class JSONLSink(TelemetrySink):
    """Lines hold "event": "step" or "request", and the fields of `StepStats` or `RequestStats`."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options: ClassVar[type[PluginOptions]] = JSONLOptions

    @classmethod
    def check(cls, need: Any, options: Any, environment: Environment) -> list[str]:
        """The file's folder must be there."""
        folder = options.path.absolute().parent
        return [] if folder.is_dir() else [f"there is no folder {folder}: create it, or give another path"]

    def __init__(self, options: JSONLOptions):
        super().__init__(options)
        self._steps = options.steps
        try:
            # Line-buffered, so that a reader sees whole lines while the engine runs.
            self._file = options.path.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(
                f"telemetry sink jsonl cannot write to {options.path} ({error.strerror}): give another path"
            ) from error

    def on_step(self, stats: StepStats) -> None:
        """Writes the step, unless `steps` is off."""
        if self._steps:
            self._write("step", stats)

    def on_request(self, stats: RequestStats) -> None:
        """Writes the request."""
        self._write("request", stats)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, event: str, stats: Any) -> None:
        self._file.write(json.dumps({"event": event, **dataclasses.asdict(stats)}) + "\n")
