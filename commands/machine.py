"""The machine of a timing, and its other load during the timing."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dovetail.registry.distributions import installed_versions

NOISE_LIMIT = 0.10
_SHORTEST = 0.3
"""Shortest span in seconds. CPU time is counted in hundredths of a second: shares of shorter spans are noise."""
_VERSIONS = ("dovetail", "torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy")


@dataclass(frozen=True)
class Span:
    """One timed repetition. Shares are of all CPU time of the machine."""

    workload: str
    repetition: int
    seconds: float
    others: float | None
    """CPU share of processes other than this one and its children; None where the span is too short."""
    stolen: float | None
    """CPU share that the host of a virtual machine took."""

    @property
    def taken(self) -> float:
        """CPU share that was not available to this process."""
        return (self.others or 0.0) + (self.stolen or 0.0)


@dataclass(frozen=True)
class _Snapshot:
    time: float
    total: float
    idle: float
    stolen: float
    own: float


class Watch:
    """Records the machine's load from its creation to `stop`."""

    def __init__(self, workload: str, repetition: int):
        self._workload = workload
        self._repetition = repetition
        self._before = _snapshot()

    def stop(self) -> Span:
        """Returns the span since creation."""
        before, after = self._before, _snapshot()
        seconds, total = after.time - before.time, after.total - before.total
        if seconds < _SHORTEST or total <= 0:
            return Span(self._workload, self._repetition, seconds, None, None)
        stolen = max(0.0, after.stolen - before.stolen)
        busy = total - (after.idle - before.idle) - stolen
        others = max(0.0, busy - (after.own - before.own))
        return Span(self._workload, self._repetition, seconds, min(1.0, others / total), min(1.0, stolen / total))


def noise_warning(spans: Sequence[Span]) -> str | None:
    """Returns a warning where other load took more than `NOISE_LIMIT` of the machine in some repetition."""
    noisy = [span for span in spans if span.taken > NOISE_LIMIT]
    if not noisy:
        return None
    worst = max(noisy, key=lambda span: span.taken)
    return (
        f"other processes (or the host, of a virtual machine) took more than {NOISE_LIMIT:.0%} of the machine in"
        f" {len(noisy)} of {len(spans)} timed runs, at most {worst.taken:.0%}: these timings are not the engine's alone"
    )


def describe_machine() -> dict[str, Any]:
    """Returns CPU, memory, system and versions as plain data."""
    memory = psutil.virtual_memory()
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cpus": psutil.cpu_count(),
        "usable_cpus": _usable_cpus(),
        "memory_gib": round(memory.total / 2**30, 1),
        "system": platform.platform(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": installed_versions(_VERSIONS),
        "load_average": round(psutil.getloadavg()[0], 2),
    }


def _snapshot() -> _Snapshot:
    times = psutil.cpu_times()._asdict()
    # Time of guests is part of user time already.
    total = sum(value for name, value in times.items() if not name.startswith("guest"))
    idle = times["idle"] + times.get("iowait", 0.0)
    return _Snapshot(time.monotonic(), total, idle, times.get("steal", 0.0), _own_seconds())


def _own_seconds() -> float:
    """CPU time of this process and its children, those that have ended included."""
    process = psutil.Process()
    own = process.cpu_times()
    seconds = own.user + own.system + own.children_user + own.children_system
    for child in process.children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        seconds += times.user + times.system
    return float(seconds)


def _cpu_model() -> str:
    if sys.platform == "linux":
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        match = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", text, re.MULTILINE)
        if match is not None:
            return match[1]
    return platform.processor() or platform.machine()


def _usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
