"""Greedy float32 tokens equal transformers' `generate`, whatever way the engine takes to them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dovetail import LLM, SamplingParams

NUM_TOKENS = 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

MEMORY = {
    "ample": {"num_blocks": 400},
    "recompute": {"num_blocks": 70},
    "swap": {"num_blocks": 70, "swap_gib": 0.01},
}


def make_prompts(count: int) -> list[list[int]]:
    """Lengths of 3 to 90; every third shares its first 20 tokens with others."""
    draw = random.Random(3)
    shared = [draw.randrange(3, 128) for _ in range(20)]
    prompts = []
    for index in range(count):
        own = [draw.randrange(3, 128) for _ in range(draw.choice([3, 8, 17, 40, 70]))]
        prompts.append(shared + own if index % 3 == 0 else own)
    return prompts


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("chunk", [16, 64, None], ids=["chunk16", "chunk64", "unchunked"])
def test_batches_equal_transformers(
    make_llm: Callable[..., LLM], hf_greedy: Callable[[list[int], int], list[int]], chunk: int | None, memory: str
) -> None:
    scheduler = {"max_num_seqs": 16, "max_num_batched_tokens": chunk or 512}
    if chunk is None:
        scheduler["enable_chunked_prefill"] = False
    llm = make_llm(scheduler=scheduler, cache=MEMORY[memory])
    prompts = make_prompts(16)
    cold = llm.generate(prompts, PARAMS)
    warm = llm.generate(prompts, PARAMS)
    expected = [hf_greedy(prompt, NUM_TOKENS) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in cold] == expected
    assert [output.outputs[0].token_ids for output in warm] == expected
    preemptions = sum(output.metrics.num_preemptions for output in cold + warm)
    assert (preemptions > 0) == (memory != "ample")
    if memory == "swap":
        assert llm.engine.cache_statistics().num_swapped_out_blocks > 0
    if memory == "ample":
        assert all(output.num_cached_tokens > 0 for output in warm if len(output.prompt_token_ids) > 8)


@pytest.mark.parametrize("attention", ["reference", "sdpa", "auto"])
def test_one_at_a_time_equals_transformers(
    make_llm: Callable[..., LLM], hf_greedy: Callable[[list[int], int], list[int]], attention: str
) -> None:
    llm = make_llm(scheduler={"max_num_seqs": 1}, attention=attention)
    for prompt in make_prompts(5):
        output = llm.generate([prompt], PARAMS)[0]
        assert output.outputs[0].token_ids == hf_greedy(prompt, NUM_TOKENS)
