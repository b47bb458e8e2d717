"""A seeded request gives the same tokens whatever else is in the batch, preempted or not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dovetail import LLM, SamplingParams

DRAW = random.Random(17)
PROMPTS = [[DRAW.randrange(3, 128) for _ in range(length)] for length in (30, 7, 22, 41, 3, 30)]
PARAMS = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=30),
    SamplingParams(temperature=1.5, seed=2, top_p=0.8, max_tokens=30),
    SamplingParams(temperature=0.7, seed=3, top_k=20, repetition_penalty=1.3, max_tokens=30),
    SamplingParams(temperature=1.0, seed=-4, min_p=0.02, frequency_penalty=0.5, max_tokens=30),
    SamplingParams(temperature=1.0, seed=2**70, presence_penalty=1.0, max_tokens=30),
    SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=30),
]
SETTINGS = {
    "batch": {},
    "small chunks": {"scheduler": {"max_num_batched_tokens": 8, "max_num_seqs": 8}},
    "recompute": {"cache": {"num_blocks": 34}},
    "swap": {"cache": {"num_blocks": 34, "swap_gib": 0.01}},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_seed_repeats_in_any_batch(make_llm: Callable[..., LLM], setting: str) -> None:
    alone = make_llm(model={"max_model_len": 96})
    expected = [alone.generate(prompt, params)[0].outputs for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    llm = make_llm(model={"max_model_len": 96}, **SETTINGS[setting])
    noise = SamplingParams(temperature=1.0, max_tokens=17)
    prompts = [[9, 9, 9, index] for index in range(5)] + PROMPTS
    outputs = llm.generate(prompts, [noise] * 5 + PARAMS)
    assert [output.outputs for output in outputs[5:]] == expected
    if "cache" in SETTINGS[setting]:
        assert sum(output.metrics.num_preemptions for output in outputs[5:]) > 0
    if setting == "swap":
        assert llm.engine.cache_statistics().num_swapped_in_blocks > 0


def test_without_a_seed_requests_differ(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20)
    outputs = make_llm().generate([[5, 6]] * 3, params)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 3


def test_the_engine_seed_repeats_a_run(make_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=20)
    runs = [
        [output.outputs[0].token_ids for output in make_llm(model={"seed": seed}).generate([[5, 6], [7]], params)]
        for seed in (3, 3, 4)
    ]
    assert runs[0] == runs[1] != runs[2]
