"""A server with the playground over a small model that tells a story, chats, and has drafters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from dovetail import AsyncLLMEngine, RequestOutput, SamplingParams
from dovetail.plugins.routes.chat.route import ChatRoute
from dovetail.plugins.routes.completions.route import CompletionsRoute
from dovetail.plugins.routes.explain.route import ExplainRoute
from dovetail.plugins.routes.metrics import MetricsRoute
from dovetail.plugins.routes.playground.route import PlaygroundRoute
from dovetail.plugins.routes.tokenize import TokenizeRoute
from dovetail.plugins.server.live import LiveServer, live_server
from dovetail.testing.story_model import save_story_model

Value = TypeVar("Value")

ROUTES = {
    label: (kind, kind.Options())
    for label, kind in {
        "chat": ChatRoute,
        "completions": CompletionsRoute,
        "explain": ExplainRoute,
        "metrics": MetricsRoute,
        "playground": PlaygroundRoute,
        "tokenize": TokenizeRoute,
    }.items()
}
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLMEngine]:
    directory: Path = tmp_path_factory.mktemp("story-model")
    save_story_model(directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    lookup = {"name": "ngram", "num_tokens": 4, "min_match": 1, "length": "fixed"}
    config = {
        "model": {"path": str(directory), "dtype": "float32", "max_model_len": 512},
        "cache": {"block_size": 4, "num_blocks": 600},
        "executor": {"threads": 1},
        "speculative": {"drafters": {"lookup": lookup, "short": {**lookup, "num_tokens": 2}}, "default": "lookup"},
        "telemetry": ["prometheus"],
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


def in_thread(create: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
    """The result of a coroutine that runs in another thread: playwright has a loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(create())).result()


@pytest.fixture
def complete(engine: AsyncLLMEngine) -> Callable[..., RequestOutput]:
    """Asks the engine itself."""

    def run(prompt: Any, **params: Any) -> RequestOutput:
        async def submit() -> RequestOutput:
            given = SamplingParams(**{"temperature": 0, "output_kind": "final_only", **params})
            return [output async for output in await engine.submit(prompt, given)][-1]

        return in_thread(submit)

    return run


@pytest.fixture
def until_idle(engine: AsyncLLMEngine) -> Callable[[], None]:
    """Returns once no request holds a KV block."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while in_thread(engine.cache_statistics).num_used_blocks:
            assert time.monotonic() < deadline, "requests hold KV blocks"
            time.sleep(0.005)

    return wait
