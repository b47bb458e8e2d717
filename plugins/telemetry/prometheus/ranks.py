"""Metrics of each worker of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.contracts.executor import RankStatus
from dovetail.contracts.telemetry import RankState
from dovetail.plugins.telemetry.prometheus.page import Labels, Page

_GAUGES: tuple[tuple[str, str, Callable[[RankStatus], float | None]], ...] = (
    ("dovetail:rank_up", "0 once the worker's process ended.", lambda status: int(status.is_alive)),
    ("dovetail:rank_silent_seconds", "Time since the worker last reported.", lambda status: status.silent_s),
    ("dovetail:rank_memory_bytes", "Resident memory of the worker's process.", lambda status: status.memory_bytes),
    ("dovetail:rank_device_memory_bytes", "Memory of tensors on the GPU.", lambda status: status.device_bytes),
    ("dovetail:rank_last_step_seconds", "Time that the last step took.", lambda status: status.last_step_s),
    ("dovetail:rank_running_step_seconds", "Time for which the step runs.", lambda status: status.running_s),
)
_COUNTERS: tuple[tuple[str, str, Callable[[RankStatus], float | None]], ...] = (
    ("dovetail:rank_steps_total", "Steps of the worker.", lambda status: status.num_steps),
    ("dovetail:rank_busy_seconds_total", "Time of the worker in steps.", lambda status: status.busy_s),
)


def write_ranks(page: Page, own: Labels, ranks: Sequence[RankState]) -> None:
    """Writes what is known; nothing where there are no ranks. `own`: labels of the engine."""
    if not ranks:
        return
    labels = [(*own, ("rank", str(one.status.rank)), ("stage", str(one.status.stage))) for one in ranks]
    page.gauge(
        "dovetail:rank_info",
        "The worker's place, as labels.",
        [((*which, *_place(one.status)), 1) for which, one in zip(labels, ranks, strict=True)],
    )
    page.gauge(
        "dovetail:rank_kv_cache_bytes",
        "KV pages of the worker.",
        [(which, one.kv_bytes) for which, one in zip(labels, ranks, strict=True)],
    )
    for write, families in ((page.gauge, _GAUGES), (page.counter, _COUNTERS)):
        for name, help_, value_of in families:
            values = [(which, value_of(one.status)) for which, one in zip(labels, ranks, strict=True)]
            known = [(which, value) for which, value in values if value is not None]
            if known:
                write(name, help_, known)


def _place(status: RankStatus) -> Labels:
    pid = "" if status.pid is None else str(status.pid)
    return (("tensor_rank", str(status.tensor_rank)), ("node", status.node), ("device", status.device), ("pid", pid))
