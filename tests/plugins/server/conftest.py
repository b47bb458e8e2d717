"""A live server over a small model that tells a story, and clients for it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from dovetail import AsyncLLMEngine
from dovetail.plugins.routes.completions.route import CompletionsRoute
from dovetail.plugins.routes.health import HealthRoute
from dovetail.plugins.routes.metrics import MetricsRoute
from dovetail.plugins.routes.models import ModelsRoute
from dovetail.plugins.routes.tokenize import TokenizeRoute
from dovetail.plugins.server.live import LiveServer, live_server
from dovetail.testing.story_model import save_story_model
from tests.waiting import wait_until

BUNDLED = {
    "health": HealthRoute,
    "metrics": MetricsRoute,
    "models": ModelsRoute,
    "completions": CompletionsRoute,
    "tokenize": TokenizeRoute,
}
ROUTES = {label: (kind, kind.Options()) for label, kind in BUNDLED.items()}


@pytest.fixture(scope="session")
def story_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("story-model")
    save_story_model(directory)
    return directory


@pytest.fixture(scope="session")
def reversed_model(story_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `story_model`, and what that finds most likely this finds least likely."""
    directory = tmp_path_factory.mktemp("reversed") / "model"
    shutil.copytree(story_model, directory)
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"] = -weights["model.norm.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def engine(story_model: Path) -> Iterator[AsyncLLMEngine]:
    config = {
        "model": {"path": str(story_model), "dtype": "float32", "max_model_len": 256},
        "cache": {"block_size": 4, "num_blocks": 600},
        "executor": {"threads": 1},
    }
    with AsyncLLMEngine.from_config(config) as created:
        yield created


@pytest.fixture(scope="session")
def server(engine: AsyncLLMEngine) -> Iterator[LiveServer]:
    with live_server(engine, ROUTES, model_names=("story", "fable")) as live:
        yield live


@pytest.fixture(scope="session")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as created:
        yield created


def num_used_blocks(engine: AsyncLLMEngine) -> int:
    return asyncio.run(engine.cache_statistics()).num_used_blocks


@pytest.fixture
def nothing_is_held(engine: AsyncLLMEngine) -> Iterator[None]:
    """After the test no request holds a KV block."""
    yield
    wait_until(lambda: num_used_blocks(engine) == 0, "no KV block is held")


def _check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """The response is an error in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param, error
    return error


@pytest.fixture
def check_error() -> Callable[..., dict[str, Any]]:
    return _check_error
