"""Embeddings of an engine in another process: to the bit those of one in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from dovetail import AsyncLLMEngine, PoolingParams, PoolingRequestOutput, RemoteEngine, SamplingParams
from dovetail.contracts.errors import RequestError
from dovetail.contracts.prompts import Prompt

WithRemote = Callable[[Callable[[RemoteEngine], Awaitable[Any]]], Any]
PROMPT = "Once upon a time there was"


async def encoded(engine: AsyncLLMEngine | RemoteEngine, params: PoolingParams) -> PoolingRequestOutput:
    (output,) = [output async for output in engine.encode(PROMPT, params)]
    return output


@pytest.mark.parametrize("params", [PoolingParams(dimensions=8), PoolingParams(task="token_embed", normalize=False)])
def test_results_are_those_of_a_local_engine(
    params: PoolingParams, with_remote: WithRemote, local_engine: AsyncLLMEngine
) -> None:
    found = with_remote(lambda remote: encoded(remote, params))
    expected = asyncio.run(encoded(local_engine, params))
    assert found.outputs == expected.outputs
    assert found.prompt_token_ids == expected.prompt_token_ids


def test_pairs_are_those_of_a_local_engine(with_remote: WithRemote, local_engine: AsyncLLMEngine) -> None:
    pairs: list[tuple[Prompt, Prompt]] = [("Once upon", "a time"), ([5, 6], [7])]
    for pair in pairs:
        found = with_remote(partial(joined, pair=pair))
        assert found == asyncio.run(joined(local_engine, pair))
        whole, cut = (len(prompt["prompt_token_ids"]) for prompt in found)
        assert whole > cut == 2


async def joined(engine: AsyncLLMEngine | RemoteEngine, pair: tuple[Prompt, Prompt]) -> Any:
    with pytest.raises(RequestError, match="not one of each"):
        await engine.pair_prompt("Once", [5])
    return [await engine.pair_prompt(*pair), await engine.pair_prompt(*pair, truncate_prompt_tokens=2)]


def test_what_is_refused_is_refused_before_it_is_sent(with_remote: WithRemote) -> None:
    async def main(remote: RemoteEngine) -> None:
        with pytest.raises(RequestError, match="dimensions is 4096"):
            await encoded(remote, PoolingParams(dimensions=4096))
        with pytest.raises(RequestError, match="generate takes SamplingParams"):
            await anext(remote.generate(PROMPT, PoolingParams()))  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="must be PoolingParams"):
            await encoded(remote, SamplingParams())  # type: ignore[arg-type]

    with_remote(main)
