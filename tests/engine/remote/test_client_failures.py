"""What goes wrong in the client of an engine costs the requests concerned, and nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dovetail import SamplingParams
from dovetail.contracts.errors import RequestError
from dovetail.engine.output_processor import OutputProcessor
from dovetail.engine.remote.client import RemoteEngine

WithRemote = Callable[[Callable[[RemoteEngine], Awaitable[Any]]], Any]

PROMPT = "Once upon a time there was"
HELD = SamplingParams(max_tokens=200, ignore_eos=True, extra={"held": "new"})


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [10**30, object(), nested(5000)], ids=["big", "object", "deep"])
def test_what_cannot_travel_is_refused_and_leaves_nothing_behind(value: Any, with_remote: WithRemote) -> None:
    async def main(engine: RemoteEngine) -> None:
        for _ in range(2):  # the id is free again
            with pytest.raises(RequestError, match="cannot be sent to the engine"):
                await engine.submit(PROMPT, SamplingParams(extra={"x": value}), "mine")
        stream = await engine.submit(PROMPT, SamplingParams(max_tokens=2), "mine")
        assert [output async for output in stream][-1].finished

    with_remote(main)


@pytest.mark.parametrize("seed", [2**70 + 5, -(2**66) + 5])
def test_of_a_seed_the_64_low_bits_count(seed: int, with_remote: WithRemote) -> None:
    async def tokens(engine: RemoteEngine, seed: int) -> Any:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=20)
        return [output async for output in await engine.submit(PROMPT, params)][-1].outputs[0].token_ids

    async def main(engine: RemoteEngine) -> None:
        assert await tokens(engine, seed) == await tokens(engine, 5)

    with_remote(main)


def test_an_update_that_cannot_be_read_ends_what_is_under_way_and_no_more(
    with_remote: WithRemote, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = OutputProcessor.process

    def fails_once(*arguments: Any) -> Any:
        monkeypatch.setattr(OutputProcessor, "process", process)
        raise ValueError("a bug")

    async def main(engine: RemoteEngine) -> None:
        stream = await engine.submit(PROMPT, HELD, "mine")
        monkeypatch.setattr(OutputProcessor, "process", fails_once)
        await engine.call("resume", request_ids="mine")
        with pytest.raises(RequestError, match="client of the engine failed: ValueError"):
            async for _ in stream:
                pass
        assert [output async for output in await engine.submit(PROMPT, SamplingParams(max_tokens=2))][-1].finished

    with_remote(main)  # waits until the engine has ended the request too
