"""An engine in a process of its own, and the same model in this process as the oracle."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dovetail import AsyncLLMEngine
from dovetail.config.load import load_config
from dovetail.contracts.errors import WorkerError
from dovetail.engine.remote.client import RemoteEngine
from dovetail.engine.remote.engine_process import EngineProcess

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
        "lora": {"enabled": True, "max_loras": 2},
        "weight_transport": "disk",
    }


@pytest.fixture(scope="session")
def start_engine(sections: dict[str, Any], holding_site: Path) -> Callable[..., EngineProcess]:
    """Starts an engine in which HOLDING of tests/conftest.py is installed, with `more` sections."""

    def start(directory: Path | None = None, **more: Any) -> EngineProcess:
        with pytest.MonkeyPatch.context() as patched:
            patched.syspath_prepend(str(holding_site))  # which the process gets too
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


def stop(process: EngineProcess) -> None:
    """Returns once the process stands still."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


@asynccontextmanager
async def silent(process: EngineProcess, client: RemoteEngine) -> AsyncIterator[None]:
    """The engine stands still, which this client of it notices soon if it expects something. A short `HEALTH_S` would
    be that of all clients, and an engine that is not scheduled for a moment would be silent as well."""
    watch = client._answers
    check_health = watch._check_health

    async def check_soon() -> None:
        try:
            await asyncio.wait_for(check_health(), 0.2)
        except TimeoutError:
            raise WorkerError("the engine has not answered") from None

    stop(process)
    try:
        await watch.close()  # it may wait for an answer already, for as long as any other client
        watch._check_health = check_soon
        watch.start()
        yield
    finally:
        watch._check_health = check_health
        os.kill(process.pid, signal.SIGCONT)


async def until_idle(engine: RemoteEngine) -> None:
    """Returns once the engine holds no KV block."""
    while (await engine.call("cache_statistics"))["num_used_blocks"]:
        await asyncio.sleep(0)
