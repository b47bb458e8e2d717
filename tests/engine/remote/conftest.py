"""An engine in a process of its own, and the same model in this process as the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dovetail import AsyncLLMEngine
from dovetail.config.load import load_config
from dovetail.engine.remote.client import RemoteEngine
from dovetail.engine.remote.engine_process import EngineProcess
from dovetail.testing.local_plugins import write_distribution

HOLDING = '''
"""Requests whose extra has "held" are held: "new" before any step, "begun" after the step of their first token."""

from dovetail.contracts.hooks import hookimpl
from dovetail.contracts.telemetry import TelemetrySink

beginning = []


@hookimpl
def dovetail_request_added(request_id, params, control):
    when = params.extra.get("held")
    if when == "new":
        control.hold(request_id)
    elif when == "begun":
        beginning.append((request_id, control))


class HoldsBegun(TelemetrySink):
    contract = (1, 0)

    def on_step(self, stats):
        if stats.first_tokens:
            while beginning:
                request_id, control = beginning.pop()
                control.hold(request_id)
'''
"""A plugin of somebody else. What a test does to a request that runs would come too late where the test's process is
not scheduled for a moment: the engine may be done with hundreds of tokens by then."""

Value = TypeVar("Value")


@pytest.fixture(scope="session")
def sections(story_model: Path) -> dict[str, Any]:
    """The config of both."""
    return {
        "model": {"path": str(story_model), "dtype": "float32", "max_model_len": 256},
        "cache": {"block_size": 4, "num_blocks": 600},
        "scheduler": {"name": "priority"},
        "executor": {"threads": 1},
        "speculative": {
            "drafters": {
                "lookup": {"name": "ngram", "num_tokens": 4, "min_match": 1, "length": "fixed"},
                "predicted": {"name": "prediction", "num_tokens": 4, "length": "fixed"},
            },
            "default": None,
        },
    }


@pytest.fixture(scope="session")
def start_engine(sections: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EngineProcess]:
    """Starts an engine in which HOLDING is installed, with `more` sections."""
    site = tmp_path_factory.mktemp("holding")
    points = {
        "dovetail.hooks.v1": {"holding": "holding"},
        "dovetail.telemetry_sink.v1": {"holding": "holding:HoldsBegun"},
    }
    write_distribution(site, "holding", entry_points=points, modules={"holding.py": HOLDING})

    def start(directory: Path | None = None, **more: Any) -> EngineProcess:
        with pytest.MonkeyPatch.context() as patched:
            patched.syspath_prepend(str(site))  # which the process gets too
            keywords = {**sections, "telemetry": ["holding"], **more}
            return EngineProcess(load_config(None, keywords=keywords, overrides=()), directory)

    return start


@pytest.fixture(scope="session")
def engine_process(start_engine: Callable[..., EngineProcess]) -> Iterator[EngineProcess]:
    """One that all tests share which leave it alive."""
    with start_engine() as process:
        process.wait()
        yield process


@pytest.fixture(scope="session")
def local_engine(sections: dict[str, Any]) -> Iterator[AsyncLLMEngine]:
    """The oracle."""
    with AsyncLLMEngine.from_config(sections) as engine:
        yield engine


@pytest.fixture
def with_remote(engine_process: EngineProcess) -> Callable[[Callable[[RemoteEngine], Awaitable[Value]]], Value]:
    """Runs a coroutine function with a client; afterwards the engine holds no KV block."""

    def run(main: Callable[[RemoteEngine], Awaitable[Value]]) -> Value:
        async def connected() -> Value:
            async with await RemoteEngine.connect(engine_process.address, 60) as engine:
                value = await main(engine)
                await until_idle(engine)
                return value

        return asyncio.run(connected())

    return run


async def until_idle(engine: RemoteEngine) -> None:
    """Returns once the engine holds no KV block."""
    while (await engine.call("cache_statistics"))["num_used_blocks"]:
        await asyncio.sleep(0)
