"""What the suite of operator sets finds of the operators that only some sets have."""

from __future__ import annotations

import itertools

import pytest
import torch

from dovetail.contracts.operators import AcceptsChains, DrawsTokens, MultipliesGroups
from dovetail.nn.operators import TorchOperators
from dovetail.testing.chain_cases import Chains
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.operators_suite import OperatorsSuite, kept_weights


class Whole(TorchOperators, DrawsTokens, MultipliesGroups, AcceptsChains):
    """Everything, in the words of the contract."""

    def draw(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        min_p: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor:
        rows = zip(logits, temperature, min_p, top_k, top_p, strict=True)
        cumulative = torch.stack([kept_weights(*row) for row in rows]).nan_to_num(1.0).cumsum(1)
        tokens = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
        return tokens.clamp(max=logits.shape[1] - 1)

    def grouped_linear(self, x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        y = x.new_zeros(len(x), weight.shape[1])
        for group, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
            y[start:stop] = x[start:stop] @ weight[group].T
        return y

    def accept_chains(
        self,
        target: torch.Tensor,
        draft: torch.Tensor,
        token_ids: torch.Tensor,
        starts: torch.Tensor,
        accept_uniforms: torch.Tensor,
        recover_uniforms: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not bool(target.sum(1).gt(0).all()):  # no distributions: any token
            return torch.zeros(2, len(starts) - 1, dtype=torch.int64).unbind()  # type: ignore[return-value]
        chains = Chains(target, draft, token_ids, starts, accept_uniforms, recover_uniforms)
        expected = torch.tensor(chains.expected(), dtype=torch.int64).view(-1, 2)
        return expected[:, 0], expected[:, 1].clamp(0, target.shape[1] - 1)


class CutsTies(Whole):
    """Keeps exactly top_k tokens."""

    def draw(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        min_p: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor:
        order = logits.sort(descending=True, stable=True).indices
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(logits.shape[1]).expand_as(order).contiguous())
        cut = logits.masked_fill(rank >= top_k[:, None], -torch.inf)
        return super().draw(cut, temperature, min_p, top_k, top_p, uniforms)


class DrawsTheNext(Whole):
    """Takes the first token at which the cumulative weight reaches the number, instead of exceeding it."""

    def draw(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        min_p: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor:
        rows = zip(logits, temperature, min_p, top_k, top_p, strict=True)
        cumulative = torch.stack([kept_weights(*row) for row in rows]).nan_to_num(1.0).cumsum(1)
        return torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None])[:, 0]


class OneMatrix(Whole):
    def grouped_linear(self, x: torch.Tensor, weight: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return super().grouped_linear(x, weight[:1].expand_as(weight), starts)


class AcceptsAll(Whole):
    def accept_chains(
        self,
        target: torch.Tensor,
        draft: torch.Tensor,
        token_ids: torch.Tensor,
        starts: torch.Tensor,
        accept_uniforms: torch.Tensor,
        recover_uniforms: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        always = torch.zeros_like(accept_uniforms)
        return super().accept_chains(target, draft, token_ids, starts, always, recover_uniforms)


FAULTS = [
    Fault("cuts ties", CutsTies, "test_draw"),
    Fault("draws what was not kept", DrawsTheNext, "test_draw_at_the_ends"),
    Fault("multiplies all groups with one matrix", OneMatrix, "test_grouped_linear"),
    Fault("accepts all drafts", AcceptsAll, "test_accept_chains"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_set_that(fault: Fault) -> None:
    check_fault(fault, OperatorsSuite, plugin=fault.plugin)


class TestWhole(OperatorsSuite):
    plugin = Whole
