"""Tokens that a grammar forces are drafts: alone, and in front of what any other drafter guesses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail import LLM, SamplingParams, StructuredOutputs
from dovetail.contracts.speculation import Draft
from dovetail.worker.speculation.draft_grammar import begins_with, put_in_front
from dovetail.worker.speculation.drafting import FORCED

GUESSERS = Path(__file__).parent / "guessers.py"
FORM = StructuredOutputs(regex="(abcdefgh[xy]ijklmn){4}")
"""Of 60 tokens 4 are not forced."""
PROMPTS = ["hello", "abcdefgh", "12-12-12"]


def drafters(byte_model: Path) -> dict[str, dict[str, Any]]:
    return {
        "grammar": {"drafters": {"d": {"name": "grammar", "num_tokens": 8, "length": "fixed"}}},
        "ngram": {"drafters": {"d": {"name": "ngram", "num_tokens": 5, "min_match": 1, "length": "fixed"}}},
        "tree": {"drafters": {"d": {"name": f"{GUESSERS}:Tree", "num_tokens": 6, "length": "fixed"}}},
        "draft_model": {
            "drafters": {"d": {"name": "draft_model", "path": str(byte_model), "num_tokens": 4, "length": "fixed"}}
        },
        "adaptive": {"drafters": {"d": {"name": "grammar", "num_tokens": 8}}},
    }


def run(llm: LLM, **params: Any) -> list[list[int]]:
    given = {"temperature": 0, "max_tokens": 80, "structured_outputs": FORM} | params
    outputs = llm.generate(PROMPTS, SamplingParams(**given))
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", ["grammar", "ngram", "tree", "draft_model", "adaptive"])
def test_the_tokens_are_those_without_drafts(byte_llm: Callable[..., LLM], byte_model: Path, name: str) -> None:
    speculative = drafters(byte_model)[name]
    llm = byte_llm(speculative=speculative, attention="reference")
    assert run(llm) == run(byte_llm(attention="reference"))
    totals = llm.engine.speculation_totals()
    rounds = sum(one.num_draft_rounds for one in totals.values())
    # 61 tokens of each of three requests; forced ones come several in a step.
    assert sum(one.num_accepted for one in totals.values()) >= 3 * 61 - rounds - 3 * 8
    if name == "grammar":
        assert set(totals) == {"d"}
        assert totals["d"].num_accepted == totals["d"].num_drafted
    if FORCED in totals:
        assert totals[FORCED].num_accepted == totals[FORCED].num_drafted


def test_a_drafter_goes_on_behind_forced_tokens(byte_llm: Callable[..., LLM], byte_model: Path) -> None:
    """A copy of the target, whose own drafts would all be accepted: forced tokens in their place leave its state
    right."""
    form = StructuredOutputs(regex="abcdefgh[a-z]{30}")
    speculative = drafters(byte_model)["draft_model"]
    free = byte_llm(speculative=speculative)
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=form)
    plain = byte_llm().generate(PROMPTS, params)
    found = free.generate(PROMPTS, params)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in plain]
    assert FORCED in free.engine.speculation_totals()


@pytest.mark.parametrize("name", ["grammar", "ngram"])
def test_seeded_samples_are_the_same(byte_llm: Callable[..., LLM], byte_model: Path, name: str) -> None:
    params = {"temperature": 1.5, "seed": 11}
    assert run(byte_llm(speculative=drafters(byte_model)[name]), **params) == run(byte_llm(), **params)


def test_what_is_put_in_front() -> None:
    forced = (1, 2)
    longer, tree = Draft([1, 2, 3]), Draft([5, 1, 2, 2], [-1, -1, 0, 1])
    assert put_in_front(longer, forced) is longer
    assert put_in_front(tree, forced) is tree
    assert put_in_front(longer, ()) is longer
    assert put_in_front(None, ()) is None
    for draft in (None, Draft([1]), Draft([1, 3, 2]), Draft([5, 1, 2], [-1, -1, 0])):
        replaced = put_in_front(draft, forced)
        assert replaced is not None
        assert list(replaced.token_ids) == [1, 2]
    assert not begins_with(Draft([]), forced)
