"""An engine in another process is paused, sleeps and wakes up as one in this process does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from dovetail.contracts.errors import ConfigError, RequestError
from dovetail.contracts.pausing import EngineConflict
from dovetail.contracts.sampling import SamplingParams
from dovetail.engine.remote.client import RemoteEngine

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


async def tokens(client: RemoteEngine) -> list[int]:
    last = [output async for output in await client.submit("Once upon a time", GREEDY)][-1]
    found: list[int] = last.outputs[0].token_ids
    return found


def test_a_whole_round(with_remote: Callable[[Callable[[RemoteEngine], Awaitable[Any]]], Any]) -> None:
    async def main(client: RemoteEngine) -> None:
        before = await tokens(client)
        running = await client.submit("Once upon a time", GREEDY)
        await client.pause("wait")
        assert [output.outputs[0].token_ids async for output in running][-1] == before
        held = await client.submit("Once upon a time", GREEDY)
        assert await client.is_paused()
        assert await client.sleep(1) > 0
        for call in (client.sleep, client.resume):
            with pytest.raises(EngineConflict):
                await call()
        with pytest.raises(ConfigError, match="sleep level 3"):
            await client.sleep(3)
        assert await client.is_sleeping()
        await client.wake_up()
        await client.resume()
        assert [output.outputs[0].token_ids async for output in held][-1] == before
        with pytest.raises(RequestError, match="pause mode 'stop'"):
            await client.pause("stop")  # type: ignore[arg-type]
        ended = await client.submit("Once upon a time", replace(GREEDY, extra={"held": "begun"}))
        await anext(aiter(ended))
        await client.pause("abort")
        assert [output.outputs[0].finish_reason async for output in ended][-1] == "abort"
        await client.resume()

    with_remote(main)
