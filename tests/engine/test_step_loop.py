"""The step loop under memory pressure: siblings that share blocks, and blocks that are kept for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dovetail import LLM, LLMEngine, SamplingParams

REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 12)),  # prompt tokens, n, max_tokens
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("cache", [{}, {"swap_gib": 0.001}, {"prefix_caching": False}], ids=["", "swap", "no prefixes"])
def test_siblings_in_tight_memory(
    make_llm: Callable[..., LLM],
    hf_greedy: Callable[..., Any],
    check_nothing_is_held: Callable[[LLMEngine], None],
    cache: dict[str, Any],
) -> None:
    # 13 blocks of 4 tokens hold one request of 52 tokens, and hardly two.
    scheduler = {"max_num_seqs": 6, "max_num_batched_tokens": 16}
    llm = make_llm(model={"max_model_len": 52}, cache={"num_blocks": 14, **cache}, scheduler=scheduler)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(requests=REQUESTS)
    # The first, alone in the batch, gives way to blocks that are kept for siblings, and comes back at once on others.
    @example(requests=[(20, 1, 6), (24, 2, 2)])
    def check(requests: list[tuple[int, int, int]]) -> None:
        prompts = [[3 + 7 * i % 120 for i in range(length)] for length, _, _ in requests]
        params = [SamplingParams(temperature=1e-6, n=n, max_tokens=most) for _, n, most in requests]
        for prompt, p, output in zip(prompts, params, llm.generate(prompts, params), strict=True):
            expected = hf_greedy(prompt, 12)[: p.max_tokens]
            assert [completion.token_ids for completion in output.outputs] == [expected] * p.n
        check_nothing_is_held(llm.engine)

    check()


def test_nothing_is_remembered_of_requests_that_are_gone(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    params = [SamplingParams(max_tokens=3, n=n) for n in (1, 3)] * 3
    llm.generate([[5, 6]] * 6, params)
    core = vars(llm.engine.core)
    kept = {name: value for name, value in core.items() if isinstance(value, dict | set) and value}
    assert kept == {}


def test_prompts_of_one_call_share_their_prefix(make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any]) -> None:
    shared = [3 + 7 * i % 120 for i in range(18)]
    prompts = [[*shared, number] for number in range(6)]
    outputs = make_llm().generate(prompts, SamplingParams(temperature=0, max_tokens=6))
    assert [output.num_cached_tokens for output in outputs] == [0, 16, 16, 16, 16, 16]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == hf_greedy(prompt, 6)
