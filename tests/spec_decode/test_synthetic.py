"""Synthetic acceptance: as often as was asked for, whatever the tokens are, and never where a form would break."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from dovetail import LLM, SamplingParams
from dovetail.contracts.errors import ConfigError
from dovetail.contracts.speculation import Draft
from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.spec_decode.experiments.cost import expected_length
from dovetail.spec_decode.synthetic import SyntheticOptions, SyntheticRule
from dovetail.testing.acceptance_suite import (
    SIGNIFICANCE,
    AcceptanceRuleSuite,
    chi_square_p,
    greedy,
    verify_request,
)
from dovetail.testing.tiny_models import save_tiny_model, tiny_config

ROUNDS = 1_000


class TestSyntheticRule(AcceptanceRuleSuite):
    plugin = SyntheticRule
    options: ClassVar[dict[str, Any]] = {"rate": 0.6}


def accepted_counts(draft: Draft, **options: Any) -> np.ndarray:
    """int64 [k + 1]: in how many of `ROUNDS` rounds 0, 1, ... drafts were accepted; the target wants other tokens."""
    random = np.random.default_rng(3)
    target = torch.eye(4)[[3] * (len(draft.token_ids) + 1)]
    requests = [verify_request(draft, target, random, greedy()) for _ in range(ROUNDS)]
    verdicts = SyntheticRule(SyntheticOptions(**options)).verify(requests)
    return np.bincount([len(verdict.accepted) for verdict in verdicts], minlength=len(draft.token_ids) + 1)


def test_a_rate_is_that_of_each_draft_behind_accepted_ones() -> None:
    expected = [0.3, 0.7 * 0.3, 0.7**2 * 0.3, 0.7**3]
    counts = accepted_counts(Draft([0, 1, 0]), rate=0.7)
    assert chi_square_p(counts, np.array(expected) * ROUNDS) > SIGNIFICANCE


def test_rates_are_shares_of_rounds_and_none_is_accepted_beyond_them() -> None:
    counts = accepted_counts(Draft([0, 1, 0, 1]), rates=[0.9, 0.5, 0.2])
    assert chi_square_p(counts, np.array([0.1, 0.4, 0.3, 0.2, 0.0]) * ROUNDS) > SIGNIFICANCE
    assert accepted_counts(Draft([0, 1]), rates=[0.0, 0.0]).tolist() == [ROUNDS, 0, 0]


def test_a_length_varies_by_one_at_most() -> None:
    counts = accepted_counts(Draft([0, 1, 0, 1]), length=2.6)
    assert chi_square_p(counts, np.array([0, 0.4, 0.6, 0, 0]) * ROUNDS) > SIGNIFICANCE


def test_of_a_tree_it_walks_down_first_children_as_of_a_chain() -> None:
    tree = Draft([0, 1, 2, 0, 1], [-1, -1, 0, 0, 2])
    expected = np.array([0.5, 0.25, 0.125, 0.125])
    assert chi_square_p(accepted_counts(tree, rate=0.5)[:4], expected * ROUNDS) > SIGNIFICANCE


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0}])
def test_forms_are_kept(sampling: dict[str, float]) -> None:
    form = SamplingParams(structured_outputs=StructuredOutputs(choice=("a", "b")), **sampling)
    request = verify_request(Draft([0, 1]), torch.eye(4)[[3, 2, 1]], np.random.default_rng(0), form)
    (verdict,) = SyntheticRule(SyntheticOptions(rate=1.0)).verify([request])
    assert (list(verdict.accepted), verdict.next_token_id) == ([], 3)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "exactly one"),
        ({"rate": 0.5, "length": 2}, "rate and length"),
        ({"rate": 1.5}, "less than or equal to 1"),
        ({"rates": [0.5, 0.6]}, "must not rise"),
        ({"rates": []}, "at least 1"),
        ({"length": 0.5}, "greater than or equal to 1"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        SyntheticOptions(**options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic")
    save_tiny_model(folder, tiny_config("llama", vocab_size=64))
    return folder


def engine(model: Path, acceptance: dict[str, Any], **sections: Any) -> LLM:
    drafter = {"name": "draft_model", "path": str(model), "num_tokens": 4, "length": "fixed"}
    return LLM(
        str(model),
        tokenizer_mode="none",
        dtype="float32",
        cache={"num_blocks": 400},
        executor={"threads": 1},
        speculative={"drafters": {"itself": drafter}, "acceptance": {"name": "synthetic", **acceptance}},
        **sections,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_accepts_as_often_as_was_asked_for(model: Path, temperature: float) -> None:
    """The drafter is the target itself, so that any real rule would accept far more. Whether a round drafts j tokens
    does not depend on its own uniforms, so rounds with j accepted among those with j drafted are binomial."""
    rate, drafts = 0.6, 4
    with engine(model, {"rate": rate}) as llm:
        prompts = [{"prompt_token_ids": [1 + i % 50, 2, 3 + i % 7]} for i in range(48)]
        params = [
            SamplingParams(temperature=temperature, max_tokens=48, ignore_eos=True, seed=seed) for seed in range(48)
        ]
        metrics = [output.metrics for output in llm.generate(prompts, params)]
    drafted, accepted = (
        np.array([[*counts, *[0] * (drafts - len(counts))] for counts in found]).sum(0)
        for found in (
            [m.drafted_per_position for m in metrics],
            [m.accepted_per_position for m in metrics],
        )
    )
    for position, (rounds, taken) in enumerate(zip(drafted, accepted, strict=True)):
        p = rate ** (position + 1)
        assert abs(taken - rounds * p) < 4 * math.sqrt(rounds * p * (1 - p))
    # Rounds with all four drafted alone: tokens per round follow equation 1 of Leviathan et al.
    length = 1 + sum(accepted / drafted)
    assert length == pytest.approx((1 - rate**5) / (1 - rate), abs=0.1)
    assert expected_length(rate, drafts) == pytest.approx((1 - rate**5) / (1 - rate))


def test_a_request_has_the_same_tokens_in_any_batch(model: Path) -> None:
    with engine(model, {"rate": 0.5}) as llm:
        prompts = [{"prompt_token_ids": [1 + i, 2, 3]} for i in range(6)]
        params = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=i) for i in range(6)]
        together = [output.metrics.num_accepted for output in llm.generate(prompts, params)]
        alone = [llm.generate([prompts[i]], params[i])[0].metrics.num_accepted for i in (3, 5)]
    assert alone == [together[3], together[5]]
    assert len(set(together)) > 1


def test_it_is_refused_where_tokens_must_not_change_and_where_rates_do_not_fit(model: Path) -> None:
    with pytest.raises(ConfigError, match="lossy"):
        engine(model, {"rate": 0.5}, reproducibility="strict")
    with pytest.raises(ConfigError, match="rates has 2 values, and num_tokens is 4"):
        engine(model, {"rates": [0.5, 0.2]})
    with pytest.raises(ConfigError, match="bring 5 at most"):
        engine(model, {"length": 6})
