"""Rows of the attention part, and how they are measured on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Check:
    """One comparison with `reference`."""

    backend: str
    dtype: str
    kv_dtype: str
    feature: str
    worst: float
    """Largest difference."""
    passed: bool


@dataclass(frozen=True)
class Speed:
    """One measurement."""

    backend: str
    workload: str
    kv_dtype: str
    time_us: float
    rate: float
    unit: str
    share: float
    """Of what the device was measured to do."""
    goal: float


def time_us(function: Callable[[], Any], repeats: int = 20) -> float:
    """Median of single calls on the device, after warming up."""
    for _ in range(3):
        function()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([start.elapsed_time(end) for start, end in pairs])) * 1000


def copy_bandwidth() -> float:
    """Bytes per second that a copy of 4 GiB reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / (time_us(lambda: target.copy_(source), 5) * 1e-6)


def matrix_rate() -> float:
    """FLOP per second of a bfloat16 product of 8192-wide matrices."""
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * 8192**3 / (time_us(lambda: left @ right, 10) * 1e-6)


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """The same as a graph."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()

    def replay() -> Any:
        graph.replay()
        return output

    return replay
