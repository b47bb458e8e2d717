"""Processed log probabilities over HTTP: those of the engine, with the mass that the truncation left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from dovetail import AsyncLLMEngine, SamplingParams

PROMPT = "Once upon a time"
SAMPLING = {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "seed": 3, "max_tokens": 6}


def test_completions_have_the_mass_of_each_token(client: httpx.Client, engine: AsyncLLMEngine) -> None:
    body = {"prompt": PROMPT, "logprobs": 1, "logprobs_mode": "processed_logprobs", **SAMPLING}
    shown = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    params = SamplingParams(logprobs=1, logprobs_mode="processed_logprobs", output_kind="final_only", **SAMPLING)

    async def run() -> Any:
        return [output async for output in await engine.submit(PROMPT, params)][-1].outputs[0]

    completion = asyncio.run(run())
    drawn = [position[token] for token, position in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert shown["token_logprobs"] == pytest.approx([entry.logprob for entry in drawn], abs=1e-4)
    assert shown["surviving_mass"] == pytest.approx([entry.surviving_mass for entry in drawn], abs=1e-4)
    assert min(shown["surviving_mass"]) < 1


def test_raw_ones_have_no_field_more_than_openais(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "logprobs": 1, **SAMPLING}
    shown = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert set(shown) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"logprobs": 1, "logprobs_mode": "raw_logits"}, "raw_logprobs or processed_logprobs"),
        ({"logprobs_mode": "processed_logprobs"}, "set logprobs"),
    ],
)
def test_what_cannot_be_is_refused(
    client: httpx.Client, check_error: Callable[..., dict[str, Any]], field: dict[str, Any], message: str
) -> None:
    response = client.post("/v1/completions", json={"prompt": PROMPT, **field})
    assert message in check_error(response, 400)["message"]
