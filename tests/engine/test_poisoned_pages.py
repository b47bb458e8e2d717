"""NaN in a part of a prompt shows when its first token is drawn; the pages that hold it must reach nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, LLMEngine, SamplingParams
from dovetail.contracts.outputs import RequestOutput

POISONING = """
from dovetail.attention_backends.sdpa import SDPABackend

class Poisoning(SDPABackend):
    left = 1

    def forward(self, layer, query, key, value, kv_cache):
        if len(query) == 16 and layer.layer_id == 1 and Poisoning.left:
            Poisoning.left -= 1
            value = value * float("nan")
        return super().forward(layer, query, key, value, kv_cache)
"""

SPOILING = """
from dataclasses import replace
from dovetail.spec_decode.draft_model import DraftModelDrafter

class Spoiling(DraftModelDrafter):
    calls = 0

    def propose(self, batch):
        Spoiling.calls += 1
        if Spoiling.calls == 1:  # fills its pages of the first 16 tokens as if these were others
            wrong = [replace(request, token_ids=(request.token_ids + 1) % 128) for request in batch.requests]
            batch = replace(batch, requests=wrong)
        if Spoiling.calls == 2:
            raise RuntimeError("finds it out")
        return super().propose(batch)
"""

PROMPT = [3 + 7 * i % 120 for i in range(40)]
"""Computed as 16, 16 and 8 tokens, the first of which are poisoned once."""
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture
def make_poisoned(make_llm: Callable[..., LLM], tmp_path: Path) -> Callable[..., LLM]:
    path = tmp_path / "poisoning.py"
    path.write_text(POISONING)

    def make(**sections: Any) -> LLM:
        scheduler = {"max_num_batched_tokens": 16, "max_num_seqs": 4} | sections.pop("scheduler", {})
        return make_llm(attention=f"{path}:Poisoning", scheduler=scheduler, **sections)

    return make


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    last = {}
    while engine.has_unfinished_requests():
        last.update({output.request_id: output for output in engine.step() if output.finished})
    return last


def check_all_is_well(llm: LLM, hf_greedy: Callable[..., Any]) -> None:
    outputs = llm.generate([PROMPT, PROMPT[:30]], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [hf_greedy(PROMPT, 6), hf_greedy(PROMPT[:30], 6)]


def test_requests_with_the_same_prefix_are_served(
    make_poisoned: Callable[..., LLM], hf_greedy: Callable[..., Any]
) -> None:
    llm = make_poisoned()
    llm.engine.add_request("a", PROMPT, GREEDY)
    assert "NaN" in (run(llm.engine)["a"].error or "")
    check_all_is_well(llm, hf_greedy)


def test_one_that_shares_the_pages_fails_too_and_leaves_none_either(
    make_poisoned: Callable[..., LLM], hf_greedy: Callable[..., Any]
) -> None:
    llm = make_poisoned()
    engine = llm.engine
    engine.add_request("a", PROMPT, GREEDY)
    engine.step()
    other = [*PROMPT[:16], *PROMPT[::-1][:20]]
    engine.add_request("b", other, GREEDY)
    last = run(engine)
    assert engine.cache_statistics().prefix_hit_tokens == 16
    assert all("NaN" in (output.error or "") for output in last.values())
    assert llm.generate(other, GREEDY)[0].outputs[0].token_ids == hf_greedy(other, 6)
    check_all_is_well(llm, hf_greedy)


def test_siblings_compute_their_own(make_poisoned: Callable[..., LLM], hf_greedy: Callable[..., Any]) -> None:
    llm = make_poisoned()
    llm.engine.add_request("a", PROMPT, SamplingParams(temperature=1e-6, max_tokens=6, n=3))
    first, *siblings = run(llm.engine)["a"].outputs
    assert first.finish_reason == "error"
    assert [sibling.token_ids for sibling in siblings] == [hf_greedy(PROMPT, 6)] * 2
    check_all_is_well(llm, hf_greedy)


def test_pages_of_one_that_was_aborted_cost_one_request_at_most(
    make_poisoned: Callable[..., LLM], hf_greedy: Callable[..., Any]
) -> None:
    llm = make_poisoned()
    llm.engine.add_request("a", PROMPT, GREEDY)
    llm.engine.step()
    llm.engine.abort_request("a")
    llm.engine.add_request("b", PROMPT, GREEDY)
    assert "NaN" in (run(llm.engine)["b"].error or "")
    check_all_is_well(llm, hf_greedy)


def test_pages_that_were_swapped_out_meanwhile_reach_nobody(
    make_poisoned: Callable[..., LLM], hf_greedy: Callable[..., Any]
) -> None:
    scheduler = {"name": "priority", "max_num_seqs": 1}
    llm = make_poisoned(cache={"num_blocks": 66, "swap_gib": 0.01}, scheduler=scheduler)
    engine = llm.engine
    engine.add_request("a", PROMPT, GREEDY, priority=5)
    engine.step()
    engine.add_request("b", PROMPT[::-1] * 6, GREEDY)  # 240 tokens: nearly all 65 blocks
    last = run(engine)
    assert last["a"].metrics.num_preemptions > 0
    assert engine.cache_statistics().num_swapped_in_blocks > 0
    assert "NaN" in (last["a"].error or "")
    assert last["b"].outputs[0].token_ids == hf_greedy(PROMPT[::-1] * 6, 6)
    check_all_is_well(llm, hf_greedy)


def test_a_drafter_with_pages_in_the_same_blocks(
    make_poisoned: Callable[..., LLM], hf_greedy: Callable[..., Any], tiny_llama: tuple[Path, Any]
) -> None:
    drafter = {"name": "draft_model", "path": str(tiny_llama[0]), "num_tokens": 2}
    llm = make_poisoned(speculative={"drafters": {"it": drafter}})
    llm.engine.add_request("a", PROMPT, GREEDY)
    assert "NaN" in (run(llm.engine)["a"].error or "")
    check_all_is_well(llm, hf_greedy)


def test_pages_of_a_drafter_that_failed_are_used_by_no_other_request(
    make_llm: Callable[..., LLM], hf_greedy: Callable[..., Any], tiny_llama: tuple[Path, Any], tmp_path: Path
) -> None:
    path = tmp_path / "spoiling.py"
    path.write_text(SPOILING)
    drafter = {"name": f"{path}:Spoiling", "path": str(tiny_llama[0]), "num_tokens": 3, "length": "fixed"}
    llm = make_llm(
        speculative={"drafters": {"it": drafter}}, scheduler={"max_num_batched_tokens": 16, "max_num_seqs": 4}
    )
    first = llm.generate(PROMPT, GREEDY)[0]
    assert "finds it out" in (first.metrics.drafter_error or "")
    second = llm.generate(PROMPT, GREEDY)[0]
    # It is the target itself that guesses: where its pages are right, every guess stands.
    assert second.metrics.acceptance_rate == 1
    assert [output.outputs[0].token_ids for output in (first, second)] == [hf_greedy(PROMPT, 6)] * 2
