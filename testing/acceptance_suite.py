"""Conformance suite of acceptance rules. A third party's test is a subclass::

    from dovetail.testing import AcceptanceRuleSuite

    class TestMyRule(AcceptanceRuleSuite):
        plugin = MyRule

The statistical checks are deterministic: every random number comes from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import (
    AcceptanceRule,
    Draft,
    TargetView,
    Verdict,
    VerifyRequest,
)
from dovetail.contracts.structured_outputs import StructuredOutputs
from dovetail.testing.side_effects import leaves_alone
from dovetail.testing.suite import PluginSuite
from dovetail.worker.speculation.draft_sampling import draft_draw

NUM_ROUNDS = 10_000
"""Rounds per check of a distribution. If 0.035 of probability moves from one first token to another, the chi-square
statistic (14 degrees of freedom) has noncentrality 10000 * 0.035**2 * (1 / 0.5 + 1 / 0.3) = 65 or more, and is found at
`SIGNIFICANCE` with a power of 0.99."""
SIGNIFICANCE = 1e-3
"""Of each check. A sound plugin fails one of a thousand by chance, and then always, since all random numbers come from
seeds: what the suite says of a plugin does not change from run to run."""
TEMPERATURES = (1.0, 0.7, 0.2, 1.6)
"""Of sampled requests of acceptance rules."""

CELLS = 6
"""Along each of the two sides of the square in which `uniform_pair_p` counts."""


def chi_square_p(observed: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """The probability of counts at least this far from `expected` (same sum), by Pearson's test.

    Cells expected fewer than 5 times are pooled. The tail is Wilson and Hilferty's cube root approximation. 0.0 where
    something was observed that cannot happen.
    """
    if observed[expected == 0].any():
        return 0.0
    is_rare = expected < 5
    seen = np.append(observed[~is_rare], observed[is_rare].sum())
    wanted = np.append(expected[~is_rare], expected[is_rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    if freedom == 0:
        return 1.0
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    spread = 2 / (9 * freedom)
    return 1 - NormalDist().cdf(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


class AcceptanceRuleSuite(PluginSuite):
    """Tests of every acceptance rule, for the capabilities that it declares."""

    kind: ClassVar[str] = "acceptance_rule"
    plugin: ClassVar[type[AcceptanceRule]]
    options: ClassVar[Mapping[str, Any]] = {}
    num_rounds: ClassVar[int] = NUM_ROUNDS
    """Rounds per check of a distribution; see `NUM_ROUNDS`."""

    def create(self) -> AcceptanceRule:
        """Returns a new rule."""
        return self.plugin(self.plugin.Options.model_validate(dict(self.options)))

    def drafts(self) -> list[Draft]:
        """Every shape of draft that the rule says it serves, over 4 tokens."""
        chains = [Draft([]), Draft([2]), Draft([1, 1, 3])]
        trees = [Draft([0, 1, 2, 3, 0], [-1, -1, 0, 0, 3]), Draft([3, 2, 1], [-1, -1, -1])]
        return chains + (trees if self.plugin.capabilities.trees else [])

    def test_greedy_requests_get_the_best_tokens(self) -> None:
        """At temperature 0 the tokens are those that the target would choose one by one, and none more."""
        if self.plugin.capabilities.synthetic:
            pytest.skip(f"{self.plugin.__name__} is synthetic: its tokens are wrong by design")
        random = np.random.default_rng(0)
        for draft in self.drafts() * 10:
            best = random.integers(0, 4, len(draft.token_ids) + 1)
            target = torch.nn.functional.one_hot(torch.from_numpy(best), 4).float()
            verdict = self.create().verify([verify_request(draft, target, random, SamplingParams(temperature=0))])[0]
            check_path(draft, verdict)
            rows = [0, *(node + 1 for node in verdict.accepted)]
            tokens = [*(draft.token_ids[node] for node in verdict.accepted), verdict.next_token_id]
            assert tokens == best[rows].tolist()
            last = rows[-1] - 1
            children = [draft.token_ids[node] for node, parent in enumerate(draft.parent_indices) if parent == last]
            assert tokens[-1] not in children, "a draft that is right was not accepted"

    def test_answers_in_order(self) -> None:
        """One verdict per request, whatever else is in the batch."""
        random = np.random.default_rng(1)
        requests = [
            verify_request(draft, torch.eye(4)[random.integers(0, 4, len(draft.token_ids) + 1)], random, greedy())
            for draft in self.drafts()
        ]
        together = self.create().verify(requests)
        alone = [self.create().verify([request])[0] for request in requests]
        assert [(list(v.accepted), v.next_token_id) for v in together] == [
            (list(v.accepted), v.next_token_id) for v in alone
        ]
        assert list(self.create().verify([])) == []

    def sampled_requests(self, num_requests: int = 300) -> list[VerifyRequest]:
        """Requests at `TEMPERATURES` over 6 tokens, of which each row of the target leaves some out, as masks and
        truncation do. Half of the drafts are tokens that the target leaves out, and some come with distributions;
        uniforms at the ends of their range are among them."""
        random = np.random.default_rng(11)
        requests = []
        for index in range(num_requests):
            shape = self.drafts()[index % len(self.drafts())]
            parents, count = shape.parent_indices, len(shape.token_ids)
            target = random.dirichlet(np.full(6, 0.7), count + 1)
            target[random.random(target.shape) < 0.4] = 0
            target[np.arange(count + 1), random.integers(0, 6, count + 1)] += 0.2
            target /= target.sum(1, keepdims=True)
            probs = random.dirichlet(np.full(6, 0.7), count) + 0.01
            tokens: list[int] = []
            for node in range(count):
                elder = [tokens[other] for other in range(node) if parents[other] == parents[node]]
                probs[node, elder] = 0
                likely = target[parents[node] + 1] if random.random() < 0.5 else probs[node]
                choices = [token for token in range(6) if token not in elder and likely[token] > 0] or [
                    token for token in range(6) if token not in elder
                ]
                tokens.append(int(random.choice(choices)))
            given = torch.from_numpy(probs / probs.sum(1, keepdims=True)).float() if count and index % 3 else None
            uniforms = random.random(2 * count + 1)
            if index % 5 == 0:
                uniforms[:] = (0.0, 1 - 2.0**-53)[index % 2]
            draft = Draft(tokens, shape.parents, given)
            rows = torch.from_numpy(target).float()
            sampling = SamplingParams(temperature=TEMPERATURES[index % len(TEMPERATURES)])
            requests.append(request_over(draft, rows, sampling, uniforms[:count], uniforms[count:]))
        return requests

    def test_sampled_requests_get_possible_tokens(self) -> None:
        """At any temperature, of lossy rules too: each accepted node, and the token that follows the last, has a
        probability above 0 in the target's row before it. Synthetic rules keep to it where a form is asked for."""
        capabilities = self.plugin.capabilities
        self.require("sampling")
        requests = self.sampled_requests()
        if capabilities.synthetic:
            form = StructuredOutputs(choice=("yes", "no"))
            requests = [replace(r, sampling=replace(r.sampling, structured_outputs=form)) for r in requests]
        verdicts = self.create().verify(requests)
        assert len(verdicts) == len(requests)
        for request, verdict in zip(requests, verdicts, strict=True):
            check_path(request.draft, verdict)
            tokens = [*(request.draft.token_ids[node] for node in verdict.accepted), verdict.next_token_id]
            rows = [0, *(node + 1 for node in verdict.accepted)]
            for row, token in zip(rows, tokens, strict=True):
                assert float(request.target.probs()[row, token]) > 0, f"token {token} is impossible after row {row}"

    def test_next_tokens_are_possible(self) -> None:
        """The token that follows the accepted path is one that the target's row there may bring, of any rule."""
        self.require("sampling")
        requests = self.sampled_requests()
        for request, verdict in zip(requests, self.create().verify(requests), strict=True):
            check_path(request.draft, verdict)
            row = verdict.accepted[-1] + 1 if verdict.accepted else 0
            assert float(request.target.probs()[row, verdict.next_token_id]) > 0

    def test_leaves_alone_what_is_not_its_own(self) -> None:
        """It does not change its arguments, which the host reads afterwards, or the random generators of the
        process."""
        random = np.random.default_rng(2)
        rule, target = self.create(), torch.eye(6)[[1, 1, 3, 0, 2, 1]]
        requests = [verify_request(d, target[: len(d.token_ids) + 1], random, greedy()) for d in self.drafts()]
        if self.plugin.capabilities.sampling:
            requests += self.sampled_requests(60)
        with leaves_alone(requests, [(request.target.probs(), request.target.tokens()) for request in requests]):
            rule.verify(requests)

    def test_sampled_requests_repeat_in_any_batch(self) -> None:
        """With the same uniforms a request gets the same verdict, whatever else is in the batch."""
        self.require("sampling")
        together = self.create().verify(self.sampled_requests(60))
        rule = self.create()
        for request, among in list(zip(self.sampled_requests(60), together, strict=True))[::-1]:
            (alone,) = rule.verify([request])
            assert (list(alone.accepted), alone.next_token_id) == (list(among.accepted), among.next_token_id)

    def test_lossless_rules_keep_the_distribution_of_chains(self) -> None:
        """The first two tokens have the target's distribution, with and without draft probabilities."""
        if self.plugin.capabilities.lossless and self.plugin.capabilities.sampling:
            for has_probs in (True, False):
                p_value = chi_square_p(*self._counts([-1, 0], has_probs))
                assert p_value > SIGNIFICANCE, f"chain, probabilities {has_probs}: p = {p_value:.2g}"

    def test_lossless_rules_keep_the_distribution_of_trees(self) -> None:
        """The same for trees with siblings at both depths."""
        if self.plugin.capabilities.lossless and self.plugin.capabilities.trees and self.plugin.capabilities.sampling:
            for has_probs in (True, False):
                p_value = chi_square_p(*self._counts([-1, -1, 0, 0, 1], has_probs))
                assert p_value > SIGNIFICANCE, f"tree, probabilities {has_probs}: p = {p_value:.2g}"

    def _counts(self, parents: Sequence[int], has_probs: bool) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        return two_token_counts(self.create(), parents, has_probs=has_probs, num_rounds=self.num_rounds)


def two_token_counts(
    rule: AcceptanceRule, parents: Sequence[int], *, has_probs: bool, num_rounds: int = NUM_ROUNDS
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Plays rounds over a target of 4 tokens whose second token depends on the first.

    Drafts are drawn from distributions unlike the target's, siblings without replacement; without `has_probs`
    they are fixed tokens. A round that ends after one token draws the second from the target.

    Returns:
        How often each of the 16 pairs of tokens came, and how often it should have.
    """
    random = np.random.default_rng(7)
    first = np.array([0.5, 0.3, 0.15, 0.05])
    second = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.5, 0.0], [0.4, 0.4, 0.1, 0.1]])
    requests = []
    sampling = SamplingParams()
    for _ in range(num_rounds):
        token_ids, probs = _draw_draft(parents, random, has_probs=has_probs)
        rows = [first]
        for node, token in enumerate(token_ids):
            # Below depth 1 any distribution will do, as the third token is not looked at.
            rows.append(second[token] if parents[node] < 0 else first)
        draft = Draft(token_ids, list(parents), torch.from_numpy(probs).float() if has_probs else None)
        requests.append(verify_request(draft, torch.from_numpy(np.array(rows)).float(), random, sampling))
    counts = np.zeros((4, 4), dtype=np.int64)
    for request, verdict in zip(requests, rule.verify(requests), strict=True):
        check_path(request.draft, verdict)
        tokens = [*(request.draft.token_ids[node] for node in verdict.accepted), verdict.next_token_id]
        if len(tokens) == 1:
            tokens.append(_drawn(second[tokens[0]], random))
        counts[tokens[0], tokens[1]] += 1
    return counts.ravel(), (first[:, None] * second * num_rounds).ravel()


def _draw_draft(
    parents: Sequence[int], random: np.random.Generator, *, has_probs: bool
) -> tuple[list[int], NDArray[np.float64]]:
    """Tokens of a draft with these parents, and the distribution that each was drawn from given its elder siblings."""
    token_ids: list[int] = []
    probs = np.zeros((len(parents), 4))
    for node, parent in enumerate(parents):
        elder = tuple(token_ids[other] for other in range(node) if parents[other] == parent)
        probs[node] = _without(elder)
        if has_probs:
            token_ids.append(_drawn(probs[node], random))
        else:
            left = [token for token in range(4) if token not in elder]
            token_ids.append(left[(node + parent + 1) % len(left)])
    return token_ids, probs


@cache
def _without(elder: tuple[int, ...]) -> NDArray[np.float64]:
    """What drafts are drawn from, after these siblings."""
    q = np.array([0.2, 0.2, 0.25, 0.35])
    q[list(elder)] = 0
    return q / q.sum()


def _drawn(probs: NDArray[np.float64], random: np.random.Generator) -> int:
    """As `random.choice` draws, without its checks, which take longer than anything else here."""
    ends = probs.cumsum()
    return int((ends / ends[-1]).searchsorted(random.random(), side="right"))


def verify_request(
    draft: Draft, target: torch.Tensor, random: np.random.Generator, sampling: SamplingParams
) -> VerifyRequest:
    """A request with fresh uniforms."""
    count = len(draft.token_ids)
    return request_over(draft, target, sampling, random.random(count), random.random(count + 1))


def request_over(
    draft: Draft,
    target: torch.Tensor,
    sampling: SamplingParams,
    accept_uniforms: NDArray[np.float64],
    recover_uniforms: NDArray[np.float64],
) -> VerifyRequest:
    """A request over the target's distributions: float32 [k + 1, vocab_size], one-hot for greedy `sampling`."""
    return VerifyRequest(
        draft=draft,
        target=GivenRows(target, recover_uniforms[[0, *draft.depths]]),
        sampling=sampling,
        accept_uniforms=accept_uniforms,
        recover_uniforms=recover_uniforms,
    )


class GivenRows(TargetView):
    """A target whose distributions are known."""

    def __init__(self, rows: torch.Tensor, uniforms: NDArray[np.float64]):
        """`uniforms`: float64 [k + 1], by which its tokens are drawn."""
        self._rows = rows
        self._uniforms = uniforms

    def probs(self) -> torch.Tensor:
        return self._rows

    def tokens(self) -> list[int]:
        tokens: list[int] = draft_draw(self._rows, self._uniforms).tolist()
        return tokens

    def joined(self, views: Sequence[TargetView]) -> torch.Tensor:
        return torch.cat([view.probs() for view in views])


def greedy() -> SamplingParams:
    """Sampling parameters with temperature 0."""
    return SamplingParams(temperature=0)


def check_path(draft: Draft, verdict: Verdict) -> None:
    """Asserts that the accepted nodes are a path from the root."""
    last = -1
    for node in verdict.accepted:
        assert draft.parent_indices[node] == last, f"node {node} is not a child of {last}"
        last = node


def uniform_pair_p(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The chi-square's probability that pairs of numbers are uniform in the unit square; 1.0 without any pair."""
    there = ~(np.isnan(one) | np.isnan(other))
    cells = (one[there] * CELLS).astype(int) * CELLS + (other[there] * CELLS).astype(int)
    counts = np.bincount(cells, minlength=CELLS * CELLS)
    return chi_square_p(counts, np.full(CELLS * CELLS, len(cells) / CELLS**2)) if len(cells) else 1.0
