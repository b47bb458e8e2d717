from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dovetail.config.load import load_config
from dovetail.config.schema import AUTO
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import Draft, Verdict
from dovetail.spec_decode.rejection import RejectionRule
from dovetail.spec_decode.typical import TypicalOptions, TypicalRule
from dovetail.testing.acceptance_suite import (
    AcceptanceRuleSuite,
    check_path,
    chi_square_p,
    request_over,
    two_token_counts,
    verify_request,
)


class TestTypicalRule(AcceptanceRuleSuite):
    plugin = TypicalRule


def judge(draft: Draft, target: list[list[float]], options: TypicalOptions | None = None) -> Verdict:
    request = verify_request(draft, torch.tensor(target), np.random.default_rng(0), SamplingParams())
    return TypicalRule(options or TypicalOptions()).verify([request])[0]


def test_a_sure_target_wants_epsilon():
    sure = [0.91, 0.08, 0.01]
    assert list(judge(Draft([0]), [sure, sure]).accepted) == [0]
    assert list(judge(Draft([1]), [sure, sure]).accepted) == []


def test_an_unsure_target_wants_less():
    flat = [0.05] * 20
    assert min(0.09, 0.3 * math.exp(-math.log(20))) < 0.05 < 0.09
    assert list(judge(Draft([7]), [flat, flat]).accepted) == [0]
    assert list(judge(Draft([7]), [flat, flat], TypicalOptions(epsilon=0.09, delta=0.999)).accepted) == [0]
    assert list(judge(Draft([2]), [[0.5, 0.46, 0.04]] * 2).accepted) == []


def test_the_longest_path_wins_and_of_equal_ones_the_most_likely():
    half = [0.5, 0.3, 0.2]
    assert list(judge(Draft([0, 1, 0], [-1, -1, 1]), [half] * 4).accepted) == [1, 2]
    assert list(judge(Draft([1, 0], [-1, -1]), [half] * 3).accepted) == [1]


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 8))
@settings(max_examples=100, deadline=None)
def test_every_accepted_token_is_plausible_and_no_longer_path_was(seed: int, count: int):
    random = np.random.default_rng(seed)
    parents = [int(random.integers(-1, node)) if node else -1 for node in range(count)]
    tokens = random.integers(0, 5, count).tolist()
    target = random.dirichlet(np.full(5, 0.4), count + 1)
    draft = Draft(tokens, parents)
    verdict = judge(draft, target.astype(np.float32).tolist())
    check_path(draft, verdict)

    def plausible(node: int) -> bool:
        p = target[parents[node] + 1]
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        return bool(p[tokens[node]] > min(0.09, 0.3 * math.exp(-entropy)))

    def depth(node: int) -> int:
        return 0 if node < 0 else (1 + depth(parents[node]) if standing(node) else -1)

    def standing(node: int) -> bool:
        return node < 0 or (plausible(node) and standing(parents[node]))

    assert all(plausible(node) for node in verdict.accepted)
    assert len(verdict.accepted) == max(depth(node) for node in range(-1, count))
    assert target[verdict.accepted[-1] + 1 if verdict.accepted else 0][verdict.next_token_id] > 0


def test_it_changes_the_distribution_and_says_so():
    counts = two_token_counts(TypicalRule(TypicalOptions()), [-1, 0], has_probs=True, num_rounds=3000)
    assert chi_square_p(*counts) < 1e-9
    assert not TypicalRule.capabilities.lossless


def test_it_can_accept_less_than_rejection():
    """An unlikely draft stands now and then under rejection, never here (a complaint about other engines explained)."""
    random = np.random.default_rng(0)
    target = torch.tensor([[0.95, 0.05]] * 2)
    requests = [
        request_over(Draft([1]), target, SamplingParams(), random.random(1), random.random(2)) for _ in range(400)
    ]
    accepted = [
        sum(len(verdict.accepted) for verdict in rule.verify(requests))
        for rule in (TypicalRule(TypicalOptions()), RejectionRule(RejectionRule.Options()))
    ]
    assert accepted[0] == 0 < accepted[1]


def test_auto_never_takes_it():
    assert TypicalRule.preference < RejectionRule.preference
    assert load_config({"speculative": {"drafters": {"a": "ngram"}}}).config.speculative.acceptance.name == AUTO


@pytest.mark.parametrize("options", [{"epsilon": 0.0}, {"delta": 1.5}])
def test_impossible_thresholds_are_refused(options: dict[str, float]):
    with pytest.raises(ValidationError):
        TypicalOptions(**options)
