"""The prompts of one request that is pooled, in the engine together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dovetail.contracts.engine_client import EngineClient
from dovetail.contracts.errors import RequestError
from dovetail.contracts.pooling_params import PooledStates, PoolingParams
from dovetail.contracts.prompts import Prompt
from dovetail.contracts.route import APIError
from dovetail.plugins.server.sampling import with_param
from dovetail.plugins.server.streams import PooledSubmission, Streams
from dovetail.plugins.server.usage import usage

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Input:
    """One prompt."""

    prompt: Prompt
    field: str
    """Where the body has it: the `param` of its refusal."""
    second: Prompt | None = None
    """The other text of a pair that the model reads as one prompt."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[Value]):
    """What became of one prompt."""

    value: Value
    num_prompt_tokens: int
    num_cached_tokens: int


async def answers_of(
    engine: EngineClient,
    inputs: Sequence[Input],
    how: PooledSubmission,
    read: Callable[[PooledStates], Value],
    at_once: int,
) -> list[Answer[Value]]:
    """What `read` makes of each result, in order of `inputs`, of which the engine has at most `at_once` at a time.
    `read` is called as results come, so that a long response is not written in one go while streams of others wait.

    Raises what the first prompt that fails raises; the others are aborted then, as they are when this is cancelled."""
    window = asyncio.Semaphore(at_once)

    async def answer(index: int, given: Input) -> Answer[Value]:
        async with window:
            return await _answer(engine, given, index, how, read)

    tasks = [asyncio.create_task(answer(index, given)) for index, given in enumerate(inputs)]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def usage_of(answers: Iterable[Answer[Any]]) -> dict[str, Any]:
    """The tokens of all prompts."""
    given = list(answers)
    return usage(sum(one.num_prompt_tokens for one in given), 0, sum(one.num_cached_tokens for one in given))


async def _answer(
    engine: EngineClient, given: Input, index: int, how: PooledSubmission, read: Callable[[PooledStates], Value]
) -> Answer[Value]:
    try:
        prompt = await _prompt_of(engine, given, how.params)
        async with Streams(engine, [prompt], how, index) as streams:
            (output,) = await streams.last()
    except APIError as error:
        if error.status != 400 or error.param is not None:
            raise
        # A refusal that names no field of the body is about the prompt.
        raise APIError(400, f"{given.field}: {error}", param=given.field) from None
    if output.pooled is None:
        raise APIError(503, "the request was aborted before its prompt was computed: send it again")
    return Answer(read(output.pooled), len(output.prompt_token_ids), output.num_cached_tokens)


async def _prompt_of(engine: EngineClient, given: Input, params: PoolingParams) -> Prompt:
    if given.second is None:
        return given.prompt
    try:
        keep = params.truncate_prompt_tokens
        return await engine.pair_prompt(given.prompt, given.second, truncate_prompt_tokens=keep)
    except RequestError as error:
        if not engine.is_running:
            raise
        raise with_param(error) from None
