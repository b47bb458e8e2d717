"""The workers of a server's engines, between two readings of its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.plugins.commands.top.scrape import Snapshot

_SILENT_S = 5.0
"""Workers report once per second."""
Key = tuple[str, str]
"""The labels `engine` and `rank`."""


@dataclass(frozen=True)
class RankRow:
    """One worker. None: not known."""

    engine: str
    rank: int
    stage: int
    tensor_rank: int
    node: str
    device: str
    pid: int | None
    is_alive: bool
    silent_s: float | None
    """Seconds since it last reported."""
    memory_bytes: float | None
    """Resident memory of its process."""
    device_bytes: float | None
    """That tensors take on the GPU."""
    kv_bytes: float | None
    num_steps: float | None
    """Between the readings."""
    busy: float | None
    """Share of the time between the readings that it spent in steps, 0 to 1."""
    last_step_s: float | None
    running_s: float | None
    """How long the step runs that is under way."""
    replica_is_up: bool = True
    """False where its replica takes no requests; what is shown may be of before."""

    @property
    def state(self) -> str:
        """In a word or two."""
        if not self.is_alive:
            return "ended"
        if not self.replica_is_up:
            return "replica down"
        if self.silent_s is not None and self.silent_s > _SILENT_S:
            return f"silent for {self.silent_s:.0f} s"
        if self.running_s is not None and self.running_s >= 1:
            return f"in a step for {self.running_s:.0f} s"
        return "alive"


def ranks_between(before: Snapshot, now: Snapshot) -> tuple[RankRow, ...]:
    """All workers of the second reading, by engine and rank; empty where the server says nothing of them."""
    seconds = now.time - before.time
    found = {name: _by_rank(now, f"dovetail:rank_{name}") for name in _NAMES}
    earlier = {name: _by_rank(before, f"dovetail:rank_{name}") for name in _COUNTERS}
    up = {dict(labels).get("engine", ""): is_up for labels, is_up in now.of("dovetail:replica_up").items()}
    rows = []
    for labels in now.of("dovetail:rank_info"):
        named = dict(labels)
        key = named.get("engine", ""), named.get("rank", "")
        rises = {name: _rise(earlier[name].get(key), found[name].get(key)) for name in _COUNTERS}
        busy_s = rises["busy_seconds_total"]
        rows.append(
            RankRow(
                engine=key[0],
                rank=int(key[1]),
                stage=int(named["stage"]),
                tensor_rank=int(named["tensor_rank"]),
                node=named["node"],
                device=named["device"],
                pid=int(named["pid"]) if named["pid"] else None,
                is_alive=bool(found["up"].get(key, 1.0)),
                silent_s=found["silent_seconds"].get(key),
                memory_bytes=found["memory_bytes"].get(key),
                device_bytes=found["device_memory_bytes"].get(key),
                kv_bytes=found["kv_cache_bytes"].get(key),
                num_steps=rises["steps_total"],
                busy=None if busy_s is None or seconds <= 0 else min(1.0, busy_s / seconds),
                last_step_s=found["last_step_seconds"].get(key),
                running_s=found["running_step_seconds"].get(key),
                replica_is_up=bool(up.get(key[0], 1.0)),
            )
        )
    # "10" comes behind "9".
    return tuple(sorted(rows, key=lambda row: (len(row.engine), row.engine, row.rank)))


_COUNTERS = ("steps_total", "busy_seconds_total")
_NAMES = (
    *("up", "silent_seconds", "memory_bytes", "device_memory_bytes", "kv_cache_bytes", "last_step_seconds"),
    *("running_step_seconds", *_COUNTERS),
)


def _by_rank(snapshot: Snapshot, name: str) -> Mapping[Key, float]:
    found = {}
    for labels, value in snapshot.of(name).items():
        named = dict(labels)
        found[named.get("engine", ""), named.get("rank", "")] = value
    return found


def _rise(before: float | None, now: float | None) -> float | None:
    """Of a counter; one that fell was started anew, with its worker."""
    if now is None:
        return None
    return now - before if before is not None and now >= before else now
