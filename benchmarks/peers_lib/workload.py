"""The work that every engine does, and what is measured of it. Standard library only; runs in each peer's process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .base import Engine
from .machine import CPUClock, peak_memory_mb, wait_until_quiet

START = "start to first token, s"
DECODE = "decode, batch 1, tok/s"
PREFILL = "prefill, 1,024 tokens, tok/s"
BATCH = "32 x (128 in, 128 out), output tok/s"
SHARED = "64 x (512 shared + 16 in, 64 out), output tok/s"
MEMORY = "peak memory, MB"
FOREIGN = "taken by others, %"
METRICS = (DECODE, PREFILL, BATCH, SHARED, START, MEMORY)
LOWER_IS_BETTER = (START, MEMORY)

DECODE_TOKENS = 257
BATCH_TOKENS = 128
SHARED_TOKENS = 64
NUM_SHARED = 512


@dataclass(frozen=True)
class Workload:
    """Token ids of every prompt. No two prompts of different calls begin alike, so that no prefix cache helps."""

    first: list[int]
    decode: list[list[int]]
    """[2][128]: one for the time of the first token, one for the rest."""
    prefill: list[list[int]]
    """[2][1024]: a warm-up, and the one that counts."""
    batch: list[list[int]]
    """[32][128]"""
    shared: list[list[int]]
    """[64][512 + 16]"""

    @classmethod
    def cut(cls, ids: Sequence[int]) -> Workload:
        """Pieces of one text, none used twice. Raises `ValueError` if the text is too short."""
        at = 0

        def take(count: int) -> list[int]:
            nonlocal at
            at += count
            if at > len(ids):
                raise ValueError(f"the text has {len(ids)} tokens, too few")
            return list(ids[at - count : at])

        prefix = take(NUM_SHARED)
        return cls(
            first=take(128),
            decode=[take(128) for _ in range(2)],
            prefill=[take(1024) for _ in range(2)],
            batch=[take(128) for _ in range(32)],
            shared=[prefix + take(16) for _ in range(64)],
        )


class _Stopwatch:
    """Times calls, and notes what others took of the machine meanwhile."""

    def __init__(self, engine: Engine, quiet_s: float):
        self._engine = engine
        self._quiet_s = quiet_s
        self.foreign: list[tuple[float, float]] = []
        """(seconds, share) of each call."""

    def seconds(self, prompts: Sequence[Sequence[int]], num_tokens: int, num_shared: int = 0) -> float:
        wait_until_quiet(self._quiet_s)
        clock = CPUClock.now()
        started = time.perf_counter()
        outputs = self._engine.generate(prompts, num_tokens, num_shared)
        elapsed = time.perf_counter() - started
        if clock is not None:
            self.foreign.append((elapsed, clock.foreign_share()))
        if [len(output) for output in outputs] != [num_tokens] * len(prompts):
            raise RuntimeError(f"asked for {num_tokens} tokens each, got {sorted({len(o) for o in outputs})}")
        return elapsed

    def foreign_percent(self) -> float | None:
        """Share of the machine over all calls, by their time."""
        total = sum(seconds for seconds, _ in self.foreign)
        return 100 * sum(seconds * share for seconds, share in self.foreign) / total if total else None


def measure(engine: Engine, workload: Workload, started: float, quiet_s: float) -> Mapping[str, Any]:
    """All workloads once, after a warm-up of each shape that is short. `started` is when the process was launched."""
    sample = engine.generate([workload.first], 1)
    figures: dict[str, Any] = {START: time.time() - started}
    sample = engine.generate([workload.first[::-1]], 16)
    watch = _Stopwatch(engine, quiet_s)
    first = watch.seconds([workload.decode[0]], 1)
    figures[DECODE] = (DECODE_TOKENS - 1) / (watch.seconds([workload.decode[1]], DECODE_TOKENS) - first)
    engine.generate([workload.prefill[0]], 1)
    figures[PREFILL] = 1024 / watch.seconds([workload.prefill[1]], 1)
    engine.generate([prompt[::-1] for prompt in workload.batch], 2)
    figures[BATCH] = len(workload.batch) * BATCH_TOKENS / watch.seconds(workload.batch, BATCH_TOKENS)
    seconds = watch.seconds(workload.shared, SHARED_TOKENS, NUM_SHARED)
    figures[SHARED] = len(workload.shared) * SHARED_TOKENS / seconds
    figures[MEMORY] = peak_memory_mb()
    figures[FOREIGN] = watch.foreign_percent()
    return {"version": engine.version, "figures": figures, "sample": sample[0]}
