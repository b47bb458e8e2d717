"""Measurements to hand to sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dovetail.contracts.step import StepTimes
from dovetail.contracts.telemetry import RequestStats, StepStats


@pytest.fixture
def step_stats() -> Callable[..., StepStats]:
    """One step's measurements; keywords replace fields."""

    def make(**changes: Any) -> StepStats:
        values: dict[str, Any] = {
            "step_id": 1,
            "time": 100.0,
            "duration": 0.5,
            "num_running": 3,
            "num_waiting": 2,
            "num_prompt_tokens": 40,
            "num_generated_tokens": 3,
            "num_preempted": 1,
            "num_drafted": 0,
            "num_accepted": 0,
            "kv_blocks_used": 7,
            "kv_blocks_total": 20,
            "prefix_query_tokens": 80,
            "prefix_hit_tokens": 20,
            "times": StepTimes(forward=2.5),
        }
        return StepStats(**values | changes)

    return make


@pytest.fixture
def request_stats() -> RequestStats:
    return RequestStats("r1", 1.0, 1.5, 2.0, 9.0, "stop", 12, 8, 5, 1)
