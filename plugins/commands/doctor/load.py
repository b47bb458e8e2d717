"""Who else uses the CPUs while the doctor measures."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import psutil

from dovetail.plugins.commands.doctor.facts import Load


class LoadWatch:
    """Counts CPU time from its creation on."""

    def __init__(self, cpus: Sequence[int]):
        self._cpus = cpus
        self._started = time.monotonic()
        self._total = self._cpu_times()
        self._own = _own_time()

    def read(self) -> Load:
        """What others took since then, of the CPUs that this process may use."""
        seconds = time.monotonic() - self._started
        total = self._cpu_times()
        spent = {name: total[name] - self._total[name] for name in total}
        own = _own_time() - self._own
        return load_of(spent, own, seconds, len(self._cpus))

    def _cpu_times(self) -> dict[str, float]:
        per_cpu: list[Any] = psutil.cpu_times(percpu=True)
        # A container may be shown fewer CPUs than their numbers suggest.
        seen = [per_cpu[cpu] for cpu in self._cpus if cpu < len(per_cpu)] or per_cpu
        return {name: sum(times._asdict()[name] for times in seen) for name in seen[0]._fields}


def load_of(spent: dict[str, float], own: float, seconds: float, num_cpus: int) -> Load:
    """From seconds per kind of CPU time, over all CPUs, and this process's own to what others took."""
    budget = max(seconds * num_cpus, 1e-9)
    # guest time is part of user time already
    busy = sum(spent.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    steal = spent.get("steal")
    return Load(
        others=min(1.0, max(0.0, busy - own) / budget),
        steal=None if steal is None else min(1.0, max(0.0, steal) / budget),
        seconds=seconds,
    )


def _own_time() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
