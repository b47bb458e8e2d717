from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.operators import AcceptsChains, Operators
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import Draft
from dovetail.nn.operators import TorchOperators
from dovetail.spec_decode.rejection import RejectionRule, draw, residual
from dovetail.testing.acceptance_suite import (
    SIGNIFICANCE,
    AcceptanceRuleSuite,
    chi_square_p,
    request_over,
    two_token_counts,
    verify_request,
)
from dovetail.testing.chain_cases import Chains, random_chains

CHAIN = [-1, 0]
TREE = [-1, -1, 0, 0, 1]


class InvertedRule(RejectionRule):
    """The classic mistake: accepts with min(1, q / p)."""

    def accepts(self, p: float, q: float, uniform: float) -> bool:
        return uniform * p < q


class TestRejectionRule(AcceptanceRuleSuite):
    plugin = RejectionRule


class ChainOperators(TorchOperators, AcceptsChains):
    """Accepts chains one by one, in the words of the contract, and keeps how many came at once."""

    def __init__(self) -> None:
        super().__init__(PluginOptions())
        self.calls: list[int] = []

    def accept_chains(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        expected = Chains(*arguments).expected()
        self.calls.append(len(expected))
        accepted, tokens = torch.tensor(expected).unbind(1)
        return accepted, tokens


def rule_over(operators: Operators) -> RejectionRule:
    rule = RejectionRule(PluginOptions())
    rule.use_operators(operators)
    return rule


class TestRejectionRuleOverOperators(AcceptanceRuleSuite):
    plugin = RejectionRule

    # Operators judge chains; trees go the way of the class above.
    test_lossless_rules_keep_the_distribution_of_trees = None

    def create(self) -> RejectionRule:
        return rule_over(ChainOperators())


def test_operators_get_the_drawn_chains_of_a_step_at_once_and_the_rule_judges_the_rest() -> None:
    random = np.random.default_rng(2)
    chains = random_chains([2, 1, 4, 3], 11)
    parts = [chains.only(r) for r in range(4)]
    drafts = [Draft(part.token_ids.tolist(), None, part.draft) for part in parts]
    drafts += [Draft([3, 5, 1, 2], [-1, -1, 0, 1], parts[2].draft), Draft([3, 1, 4])]
    targets = [part.target for part in parts] + [parts[2].target, parts[3].target]
    sampling = [SamplingParams()] * 6
    greedy = verify_request(drafts[0], torch.eye(11)[:3], random, SamplingParams(temperature=0))
    requests = [verify_request(*each, random, params) for *each, params in zip(drafts, targets, sampling, strict=True)]
    operators = ChainOperators()
    verdicts = rule_over(operators).verify([*requests[:3], greedy, *requests[3:]])
    assert operators.calls == [4]
    assert verdicts == RejectionRule(PluginOptions()).verify([*requests[:3], greedy, *requests[3:]])
    assert rule_over(operators).verify([requests[-1]]) == [verdicts[-1]]
    assert operators.calls == [4], "where there are none, nothing is launched"


def test_operators_that_accept_no_chains_are_not_asked() -> None:
    request = verify_request(
        Draft([0], None, torch.ones(1, 1)), torch.ones(2, 1), np.random.default_rng(0), SamplingParams()
    )
    assert rule_over(TorchOperators(PluginOptions())).verify([request])[0].accepted == [0]


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_distribution_check_finds_inverted_acceptance(parents: list[int]) -> None:
    counts = two_token_counts(InvertedRule(PluginOptions()), parents, has_probs=True, num_rounds=3000)
    assert chi_square_p(*counts) < 1e-9


def emitted(rule: RejectionRule, p: list[float], q: list[float], num_points: int = 2048) -> np.ndarray:
    """The exact distribution of the first token, with drafts enumerated and both uniforms integrated over a
    lattice (Fibonacci's second coordinate), whose error is of the order log(n) / n."""
    u = (np.arange(num_points) + 0.5) / num_points
    v = (np.arange(num_points) * 0.6180339887498949) % 1.0
    probs = torch.tensor([q])
    target = torch.tensor([p, p])
    result = np.zeros(len(p))
    for token, weight in enumerate(q):
        requests = [
            request_over(Draft([token], None, probs), target, SamplingParams(), u[i : i + 1], np.array([v[i], 0.5]))
            for i in range(num_points)
        ]
        for request, verdict in zip(requests, rule.verify(requests), strict=True):
            first = request.draft.token_ids[0] if verdict.accepted else verdict.next_token_id
            result[first] += weight / num_points
    return result


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]),
        ([0.6, 0.4, 0.0], [0.1, 0.1, 0.8]),
        ([0.25, 0.25, 0.5], [0.25, 0.25, 0.5]),
    ],
    ids=["crossed", "impossible draft", "equal"],
)
def test_one_draft_leaves_the_target_exactly(p: list[float], q: list[float]) -> None:
    np.testing.assert_allclose(emitted(RejectionRule(PluginOptions()), p, q), p, atol=3e-3)


def test_exact_enumeration_finds_inverted_acceptance() -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    assert np.abs(emitted(InvertedRule(PluginOptions()), p, q) - p).max() > 0.05


@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_draws_have_probability_and_residuals_sum_to_one(seed: int, vocab_size: int) -> None:
    random = np.random.default_rng(seed)
    p, q = (torch.from_numpy(random.dirichlet(np.full(vocab_size, 0.1))).float() for _ in range(2))
    for uniform in (0.0, random.random(), 1 - 2.0**-53):
        assert p[draw(p[None], np.array([uniform]))] > 0
    rest = residual(p, q)
    assert float(rest.sum()) == pytest.approx(1.0, abs=1e-5)
    assert not (rest[q > p] > 0).any() or torch.equal(rest, p)


def test_fixed_drafts_stand_as_often_as_the_target_has_them() -> None:
    random = np.random.default_rng(3)
    target = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    requests = [
        request_over(Draft([0]), target, SamplingParams(), random.random(1), random.random(2)) for _ in range(4000)
    ]
    accepted = sum(len(verdict.accepted) for verdict in RejectionRule(PluginOptions()).verify(requests))
    assert chi_square_p(np.array([accepted, 4000 - accepted]), np.array([2800.0, 1200.0])) > SIGNIFICANCE
