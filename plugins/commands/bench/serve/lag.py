"""The client's own delay: a load generator that lags measures itself."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from dovetail.plugins.commands.bench.stats import percentile

_PERIOD_S = 0.005
LAG_LIMIT_S = 0.005
CPU_LIMIT = 0.8


@dataclass(frozen=True)
class ClientLoad:
    """How busy the client was."""

    lag_p50_s: float
    """How much later than due the event loop ran what was due."""
    lag_p99_s: float
    lag_max_s: float
    cpu_share: float
    """CPU seconds of this process per second: its loop runs on one core, so 1 is all that it has."""

    def describe(self) -> dict[str, Any]:
        """As milliseconds and shares, for the result."""
        return {
            "loop_lag_p50_ms": round(self.lag_p50_s * 1e3, 3),
            "loop_lag_p99_ms": round(self.lag_p99_s * 1e3, 3),
            "loop_lag_max_ms": round(self.lag_max_s * 1e3, 3),
            "cpu_share_of_one_core": round(self.cpu_share, 3),
        }

    def warning(self) -> str | None:
        """Says that the client was too slow for what it measured; None where it was not."""
        if self.lag_p99_s <= LAG_LIMIT_S and self.cpu_share <= CPU_LIMIT:
            return None
        return (
            f"the client itself lagged: its event loop ran up to {self.lag_p99_s * 1e3:.1f} ms late (p99) and used"
            f" {self.cpu_share:.0%} of a core, so latencies hold its delay too; give it a core of its own, or send less"
        )


class LoadWatch:
    """Notes the event loop's lag from entry to exit."""

    def __init__(self) -> None:
        self._lags: list[float] = []

    async def __aenter__(self) -> LoadWatch:
        self._began, self._cpu = time.monotonic(), time.process_time()
        self._task = asyncio.create_task(self._note())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._seconds, self._used = time.monotonic() - self._began, time.process_time() - self._cpu

    def found(self) -> ClientLoad:
        """Returns the load, after the exit."""
        lags = self._lags or [0.0]
        share = self._used / self._seconds if self._seconds > 0 else 0.0
        return ClientLoad(percentile(lags, 50), percentile(lags, 99), max(lags), share)

    async def _note(self) -> None:
        while True:
            due = time.monotonic() + _PERIOD_S
            await asyncio.sleep(_PERIOD_S)
            self._lags.append(max(0.0, time.monotonic() - due))
