"""What lies where in a page, what shares a call, and models that attend through it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dovetail_column_pages import plan
from dovetail_column_pages.backend import ColumnPages, ColumnPagesOptions
from dovetail_column_pages.plan import Planner

from dovetail import LLM, SamplingParams
from dovetail.contracts.attention import Reach
from dovetail.contracts.errors import DovetailError
from dovetail.testing.attention_cases import AttentionCase, CaseShape, random_case
from dovetail.testing.story_model import STORY, save_story_model


def test_a_page_holds_keys_by_columns() -> None:
    """What the README says of the layout, for who reads pages by another program."""
    case = random_case(0, CaseShape(lengths=((5, 0),), block_size=16, head_size=8, num_kv_heads=2))
    backend = ColumnPages(ColumnPagesOptions(), case.setup)
    cache = case.filled_cache(backend)
    backend.plan(case.batch())
    case.forward(backend, *case.inputs(), cache)
    (request,) = case.requests
    keys, values = cache[request.block_ids[0]]
    for head in range(2):
        assert torch.equal(keys[head].view(8, 16)[:, 3], request.keys[3, head].to(keys.dtype))
        assert torch.equal(values[head].view(16, 8)[3], request.values[3, head].to(values.dtype))


def calls(case: AttentionCase, max_pages: int = 10_000) -> list[plan.Call]:
    return Planner(case.layer.reach, case.setup, max_pages).plan(case.batch())


def decoding(*num_cached: int) -> AttentionCase:
    return random_case(1, CaseShape(lengths=tuple((1, cached) for cached in num_cached), block_size=8, head_size=8))


def test_requests_that_decode_share_a_call() -> None:
    (call,) = calls(decoding(*range(60, 100)))
    assert call.rows.shape == (40, 1)


def test_a_call_is_not_padded_to_more_than_twice() -> None:
    shared = calls(decoding(*[500] * 3, *[90] * 5, *[50] * 4))
    assert [len(call.rows) for call in shared] == [3, 9]
    rows = torch.cat([call.rows.flatten() for call in shared]).sort().values
    assert torch.equal(rows, torch.arange(12)), "each query token is in one call"


def test_a_call_gathers_no_more_than_it_may() -> None:
    """Unless one request alone needs more."""
    shared = calls(decoding(*[79] * 7, 300), max_pages=20)
    assert [tuple(call.pages.shape) for call in shared] == [(1, 38), (2, 10), (2, 10), (2, 10), (1, 10)]


def test_pages_that_a_window_has_left_are_not_gathered() -> None:
    case = decoding(200, 180)
    case = replace(case, setup=replace(case.setup, layers=(replace(case.layer, window=16),)))
    assert case.layer.reach == Reach(window=16)
    (call,) = calls(case)
    assert call.pages.shape == (2, 3)


@pytest.mark.parametrize("max_scores", [1, 3000])
def test_a_prompt_may_be_cut_into_small_tiles(monkeypatch: pytest.MonkeyPatch, max_scores: int) -> None:
    """As the prompts of models with many heads are."""
    monkeypatch.setattr(plan, "MAX_SCORES", max_scores)
    case = random_case(2, CaseShape(lengths=((70, 20), (33, 0)), block_size=8, head_size=8, has_alibi=True))
    assert len(calls(case)) > 10
    output = case.run_from_scratch(ColumnPages(ColumnPagesOptions(), case.setup))
    np.testing.assert_allclose(output.double(), case.expected(), atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("story")
    save_story_model(directory)
    return directory


def told(story: Path, attention: str, **sections: Any) -> list[list[int]]:
    """Tokens of prompts of many lengths, whole and with a common prefix, in chunks."""
    start = STORY.index("One day")
    prompts = [STORY[:size] for size in (9, 40, 130, 260)] + [STORY[start : start + size] for size in (30, 90)]
    sections = {"scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 4}, **sections}
    with LLM(model={"path": str(story), "dtype": "float32"}, attention=attention, **sections) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, logprobs=0), use_tqdm=False)
        again = llm.generate(prompts[-2:], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    assert [one.outputs[0].token_ids for one in again] == [one.outputs[0].token_ids for one in outputs[-2:]]
    return [list(one.outputs[0].token_ids) for one in outputs]


def test_tokens_are_those_of_the_reference(story: Path) -> None:
    assert told(story, "column_pages") == told(story, "reference")


def test_trees_are_verified(story: Path) -> None:
    """Several continuations at once; the accepted ones are moved to where they belong."""
    drafts = {"name": "suffix", "tree": True, "num_tokens": 6, "length": "fixed"}
    speculative = {"drafters": {"draft": drafts}, "default": "draft"}
    assert told(story, "column_pages", speculative=speculative) == told(story, "reference")


def test_pages_of_less_than_two_bytes_are_refused(story: Path) -> None:
    with pytest.raises(DovetailError, match=r"keeps keys and values in .*, not in int8; set cache\.dtype"):
        LLM(model={"path": str(story)}, attention="column_pages", cache={"dtype": "int8"})
