"""Adapters of an engine in another process, and of one that coroutines use: loaded while steps go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail import AsyncLLMEngine, LoRARequest, RemoteEngine, SamplingParams
from dovetail.contracts.engine_client import EngineClient
from dovetail.contracts.errors import RequestError
from dovetail.contracts.lora import AdapterConflict, AdapterNotFound
from dovetail.testing.tiny_adapters import save_adapter

WithClient = Callable[[Callable[[EngineClient], Awaitable[Any]]], Any]
PROMPT = "Once upon a time there was"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(params=["remote", "async"])
def with_client(
    request: pytest.FixtureRequest,
    with_remote: Callable[[Callable[[RemoteEngine], Awaitable[Any]]], Any],
    local_engine: AsyncLLMEngine,
) -> WithClient:
    """Runs a coroutine function with an engine in another process, or in this one."""

    async def unloaded(client: EngineClient) -> None:
        for each in await client.list_loras():
            await client.remove_lora(each.name)

    def run(main: Callable[[EngineClient], Awaitable[Any]]) -> Any:
        async def whole(client: EngineClient) -> Any:
            try:
                return await main(client)
            finally:
                await unloaded(client)

        return with_remote(whole) if request.param == "remote" else asyncio.run(whole(local_engine))

    return run


@pytest.fixture
def adapter(tmp_path: Path, story_model: Path) -> LoRARequest:
    return LoRARequest("pirate", 3, str(save_adapter(tmp_path / "pirate", story_model, seed=1)))


async def tokens(client: EngineClient, lora: LoRARequest | None = None) -> list[int]:
    last = [output async for output in await client.submit(PROMPT, GREEDY, lora_request=lora)][-1]
    assert last.lora_request == lora
    found: list[int] = last.outputs[0].token_ids
    return found


def test_adapters_are_loaded_listed_used_and_unloaded(with_client: WithClient, adapter: LoRARequest) -> None:
    async def main(client: EngineClient) -> None:
        added = await client.add_lora(adapter)
        assert (added.name, added.int_id, added.rank) == ("pirate", 3, 4)
        assert await client.list_loras() == [added]
        plain, adapted = await asyncio.gather(tokens(client), tokens(client, adapter))
        assert plain != adapted == await tokens(client, LoRARequest("pirate"))
        await client.pin_lora("pirate")
        [listed] = await client.list_loras()
        assert (listed.is_in_slot, listed.is_pinned, listed.num_requests) == (True, True, 0)
        await client.remove_lora(3)
        assert await client.list_loras() == []

    with_client(main)


def test_refusals_arrive_as_what_they_are(with_client: WithClient, adapter: LoRARequest, tmp_path: Path) -> None:
    async def main(client: EngineClient) -> None:
        with pytest.raises(AdapterNotFound, match="no adapter 'pirate' is loaded"):
            await client.submit(PROMPT, GREEDY, lora_request=LoRARequest("pirate"))
        with pytest.raises(AdapterNotFound, match="nowhere is not there"):
            await client.add_lora(LoRARequest("pirate", 0, str(tmp_path / "nowhere")))
        with pytest.raises(RequestError, match=r"it has no adapter_config\.json"):
            await client.add_lora(LoRARequest("pirate", 0, str(tmp_path)))
        stream = await client.submit(PROMPT, GREEDY, lora_request=LoRARequest("empty", 0, str(tmp_path)))
        with pytest.raises(RequestError, match=r"it has no adapter_config\.json"):
            [_ async for _ in stream]
        await client.add_lora(adapter)
        with pytest.raises(AdapterConflict, match="unload it first"):
            await client.add_lora(LoRARequest("pirate", 0, str(tmp_path)))

    with_client(main)


def test_an_adapter_in_use_is_not_unloaded(with_client: WithClient, adapter: LoRARequest) -> None:
    async def main(client: EngineClient) -> None:
        await client.add_lora(adapter)  # one that is read only after the test would not be unloaded then
        await client.pause("keep")
        stream = await client.submit(PROMPT, GREEDY, lora_request=adapter)
        with pytest.raises(AdapterConflict, match="'pirate' is used by 1 request"):
            await client.remove_lora("pirate")
        stream.close()
        await client.resume()

    with_client(main)


def test_facts_say_how_many_adapters_a_step_applies(with_client: WithClient) -> None:
    async def main(client: EngineClient) -> int:
        return client.facts.max_loras

    assert with_client(main) == 2
