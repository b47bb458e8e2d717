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
def request_stats(make_request_stats: Callable[..., RequestStats]) -> RequestStats:
    return make_request_stats()


@pytest.fixture
def make_request_stats() -> Callable[..., RequestStats]:
    """One request's measurements; keywords replace fields."""

    def make(**changes: Any) -> RequestStats:
        values: dict[str, Any] = {
            "request_id": "r1",
            "arrival_time": 1.0,
            "first_scheduled_time": 1.5,
            "first_token_time": 2.0,
            "finish_time": 9.0,
            "finish_reason": "stop",
            "num_prompt_tokens": 12,
            "num_cached_tokens": 8,
            "num_generated_tokens": 5,
            "num_preemptions": 1,
        }
        return RequestStats(**values | changes)

    return make
