"""`dovetail top` of a server: what its clients got is what it shows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from dovetail import AsyncLLMEngine
from dovetail.plugins.commands.top.command import app
from dovetail.plugins.routes.completions.route import CompletionsRoute
from dovetail.plugins.routes.metrics import MetricsRoute
from dovetail.plugins.server.live import LiveServer, live_server

BUNDLED = {"metrics": MetricsRoute, "completions": CompletionsRoute}
ROUTES = {label: (kind, kind.Options()) for label, kind in BUNDLED.items()}


@pytest.fixture
def measured(story_model: Path) -> Iterator[LiveServer]:
    config = {
        "model": {"path": str(story_model), "dtype": "float32", "max_model_len": 256},
        "cache": {"block_size": 4, "num_blocks": 200},
        "executor": {"threads": 1},
        "telemetry": [{"name": "prometheus", "model_name": "story"}],
    }
    with AsyncLLMEngine.from_config(config) as engine, live_server(engine, ROUTES, model_names=("story",)) as live:
        yield live


def test_top_of_a_server(measured: LiveServer) -> None:
    body = {"model": "story", "prompt": "Once upon", "max_tokens": 5, "ignore_eos": True}
    answers = [httpx.post(f"{measured.url}/v1/completions", json=body, timeout=60).json() for _ in range(3)]
    result = CliRunner().invoke(app, [measured.url, "--once", "--json", "--interval", "0.05"])
    data = json.loads(result.stdout)
    assert data["now"]["running"] == data["now"]["waiting"] == 0
    assert data["since_start"]["ended"] == {"length": 3}
    assert data["since_start"]["generation_tokens"] == sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert data["since_start"]["latencies"]["ttft"]["count"] == 3
    assert data["interval"]["generation_tokens"] == 0
