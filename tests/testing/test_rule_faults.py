"""What the suite of acceptance rules finds: each a change in a rule that passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.contracts.speculation import AcceptanceRule, Verdict, VerifyRequest
from dovetail.spec_decode.rejection import RejectionRule
from dovetail.spec_decode.typical import TypicalRule
from dovetail.testing.acceptance_suite import NUM_ROUNDS, AcceptanceRuleSuite
from dovetail.testing.faults import Fault, check_fault

POSSIBLE = "test_sampled_requests_get_possible_tokens"


def is_sampled(request: VerifyRequest) -> bool:
    return request.sampling.temperature > 0


class RaisesWhereSampled(TypicalRule):
    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        assert not any(is_sampled(request) for request in requests)
        return super().verify(requests)


class ThroughRefusedNodes(TypicalRule):
    """Goes on below a node that it refused, if the target likes what comes there."""

    def _longest_path(self, draft: Any, target: Any) -> list[int]:
        for node, parent in enumerate(draft.parent_indices):
            if parent >= 0 and target[parent + 1, draft.token_ids[node]] > 0.5:
                path = [node]
                while draft.parent_indices[path[0]] >= 0:
                    path.insert(0, draft.parent_indices[path[0]])
                return path
        return super()._longest_path(draft, target)


class WithoutTheWayThere(TypicalRule):
    """Names the last node of its path alone."""

    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        return [replace(verdict, accepted=verdict.accepted[-1:]) for verdict in super().verify(requests)]


class FromAnotherRow(TypicalRule):
    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        verdicts = super().verify(requests)
        return [
            replace(verdict, next_token_id=request.target.tokens()[0]) if is_sampled(request) else verdict
            for request, verdict in zip(requests, verdicts, strict=True)
        ]


class AcceptsAnything(TypicalRule):
    """Of sampled requests."""

    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        answers = []
        for request, verdict in zip(requests, super().verify(requests), strict=True):
            path: list[int] = []
            for node, parent in enumerate(request.draft.parent_indices):
                if parent == (path[-1] if path else -1):
                    path.append(node)
            last = path[-1] + 1 if path else 0
            answers.append(Verdict(path, request.target.tokens()[last]) if is_sampled(request) else verdict)
        return answers


class AcceptsTheImpossible(TypicalRule):
    """Where a token's probability is 0, takes it for likely."""

    def _longest_path(self, draft: Any, target: Any) -> list[int]:
        return super()._longest_path(draft, torch.where(target > 0, target, 0.5))


class OneVerdictTooFew(TypicalRule):
    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        return super().verify(requests)[: max(1, len(requests) - 1)]


class SortsRequests(TypicalRule):
    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        return super().verify(sorted(requests, key=lambda request: len(request.draft.token_ids)))


class KeepsCount(TypicalRule):
    """Accepts less and less."""

    num_seen = 0

    def _longest_path(self, draft: Any, target: Any) -> list[int]:
        self.num_seen += 1
        return super()._longest_path(draft, target)[: max(0, 3 - self.num_seen // 4)]


class RaisesWhereCold(TypicalRule):
    """Below temperature 1."""

    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        assert not any(0 < request.sampling.temperature < 1 for request in requests)
        return super().verify(requests)


class SeedsTorch(TypicalRule):
    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        torch.manual_seed(0)
        return super().verify(requests)


class WritesToTheTarget(TypicalRule):
    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        verdicts = super().verify(requests)
        for request in requests:
            request.target.probs().zero_()
        return verdicts


NOT_ITS_OWN = "test_leaves_alone_what_is_not_its_own"
LOSSY_FAULTS = [
    Fault("raises where requests are sampled", RaisesWhereSampled, POSSIBLE),
    Fault("returns a path through a node that it refused", ThroughRefusedNodes, POSSIBLE),
    Fault("leaves out the way to the node", WithoutTheWayThere, POSSIBLE),
    Fault("returns the token of another row", FromAnotherRow, POSSIBLE),
    Fault("accepts anything", AcceptsAnything, POSSIBLE),
    Fault("accepts what has probability 0", AcceptsTheImpossible, POSSIBLE),
    Fault("gives a verdict too few", OneVerdictTooFew, POSSIBLE),
    Fault("answers in another order", SortsRequests, "test_answers_in_order"),
    Fault("accepts less and less", KeepsCount, "test_sampled_requests_repeat_in_any_batch"),
    Fault("raises below temperature 1", RaisesWhereCold, POSSIBLE),
    Fault("seeds the random generator of torch", SeedsTorch, NOT_ITS_OWN),
    Fault("writes to the target's probabilities", WritesToTheTarget, NOT_ITS_OWN),
]


class Inverted(RejectionRule):
    """The classic mistake: accepts with min(1, q / p)."""

    def accepts(self, p: float, q: float, uniform: float) -> bool:
        return uniform * p < q


class Eager(RejectionRule):
    """Accepts 15% too readily."""

    def accepts(self, p: float, q: float, uniform: float) -> bool:
        return uniform * q < 1.15 * p


class DrawsFromTheTarget(RejectionRule):
    """After a refusal too, with what accepted."""

    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        answers = []
        for request, verdict in zip(requests, super().verify(requests), strict=True):
            last = verdict.accepted[-1] + 1 if verdict.accepted else 0
            answers.append(replace(verdict, next_token_id=request.target.tokens()[last]))
        return answers


class OneUniform(RejectionRule):
    """Recovers with the numbers that it accepted by."""

    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        return super().verify(
            [
                replace(request, recover_uniforms=np.append(request.accept_uniforms, request.recover_uniforms[-1]))
                for request in requests
            ]
        )


CHAINS = "test_lossless_rules_keep_the_distribution_of_chains"
TREES = "test_lossless_rules_keep_the_distribution_of_trees"
LOSSLESS_FAULTS = [
    Fault("turns the ratio round", Inverted, CHAINS),
    Fault("turns the ratio round in trees", Inverted, TREES),
    Fault("accepts 15% too readily", Eager, CHAINS),
    Fault("draws from the target after a refusal", DrawsFromTheTarget, CHAINS),
    Fault("draws with the uniforms that it accepted by", OneUniform, CHAINS),
]


@pytest.mark.parametrize("fault", LOSSY_FAULTS + LOSSLESS_FAULTS, ids=str)
def test_the_suite_finds_a_rule_that(fault: Fault) -> None:
    assert issubclass(fault.plugin, AcceptanceRule)
    # The small fault needs as many rounds as the suite has, the others are plain in a few.
    num_rounds = NUM_ROUNDS if fault.plugin is Eager else 2500
    check_fault(fault, AcceptanceRuleSuite, plugin=fault.plugin, num_rounds=num_rounds)
