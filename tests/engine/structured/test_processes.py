"""Workers in other processes compile by themselves; async engines wait for grammars like others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail import LLM, AsyncLLMEngine, SamplingParams, StructuredOutputs
from dovetail.contracts.errors import RequestError

FORM = StructuredOutputs(json={"type": "array", "items": {"enum": [1, 20, "x"]}, "maxItems": 3}, max_whitespace=0)
PARAMS = SamplingParams(temperature=0, max_tokens=60, structured_outputs=FORM)
PROMPTS = ["hello", "1, 20, 1, 20", "[1,20"]
GRAMMAR = {"drafters": {"d": {"name": "grammar", "num_tokens": 4, "length": "fixed"}}}


@pytest.fixture
def expected(byte_llm: Callable[..., LLM]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in byte_llm().generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("speculative", [None, GRAMMAR])
def test_two_ranks_give_the_tokens_of_one(byte_llm, expected, speculative):
    llm = byte_llm(executor={"name": "multiproc", "tensor_parallel": 2, "threads": 1}, speculative=speculative)
    assert [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS)] == expected


def test_an_async_engine_serves_good_and_refuses_bad_forms(byte_model: Path, expected):
    wrong = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputs(json={"oneOff": []}))

    async def run() -> tuple[list[list[int]], RequestError | None]:
        engine = AsyncLLMEngine.from_config(
            model={"path": str(byte_model), "dtype": "float32", "max_model_len": 256},
            cache={"block_size": 4, "num_blocks": 400},
            executor={"threads": 1},
        )

        async def last(prompt: str, params: SamplingParams):
            async for output in engine.generate(prompt, params):
                final = output
            return final

        try:
            *good, bad = await asyncio.gather(
                *[last(prompt, PARAMS) for prompt in PROMPTS], last("x", wrong), return_exceptions=True
            )
        finally:
            await asyncio.to_thread(engine.shutdown)
        return [list(output.outputs[0].token_ids) for output in good], bad

    found, error = asyncio.run(run())
    assert found == expected
    assert isinstance(error, RequestError)
    assert "oneOff" in str(error)


def test_what_ended_by_itself_is_an_instance(byte_llm):
    [output] = byte_llm().generate(["hello"], PARAMS)
    assert output.outputs[0].finish_reason == "stop"
    assert all(item in (1, 20, "x") for item in json.loads(output.outputs[0].text))
