"""What the suite of operator sets finds: each a change in a set that passes."""

from __future__ import annotations

import itertools

import pytest
import torch

from dovetail.contracts.operators import (
    AcceptsChains,
    AddsNarrowLowRank,
    DrawsTokens,
    MultipliesGroups,
    OperatorsCapabilities,
    OperatorsNeed,
)
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.nn.operators import TorchOperators
from dovetail.testing.chain_cases import Chains
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.operators_suite import OperatorsSuite, kept_weights


class Whole(TorchOperators, DrawsTokens, MultipliesGroups, AcceptsChains, AddsNarrowLowRank):
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

    def add_low_rank(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        part_starts: torch.Tensor,
        ranks: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                inner = self.inner(a[slot], x[row])
                parts = itertools.pairwise(part_starts.tolist())
                added = [inner[part] @ b[slot, :, start:stop].double() for part, (start, stop) in enumerate(parts)]
                y[row] = (y[row].double() + torch.cat(added)).to(y.dtype)

    def inner(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[parts, rank] of one row."""
        return a.double() @ x.double()


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


Adapters = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""a, b, part_starts and ranks."""


class Adding(Whole):
    """For faults: takes the other arguments together."""

    def add_low_rank(self, y: torch.Tensor, x: torch.Tensor, *others: torch.Tensor) -> None:  # type: ignore[override]
        *adapters, slots = others
        self.add(y, x, tuple(adapters), slots)  # type: ignore[arg-type]

    def add(self, y: torch.Tensor, x: torch.Tensor, adapters: Adapters, slots: torch.Tensor) -> None:
        super().add_low_rank(y, x, *adapters, slots)


class AddsOneAdapterToAll(Adding):
    def add(self, y: torch.Tensor, x: torch.Tensor, adapters: Adapters, slots: torch.Tensor) -> None:
        super().add(y, x, adapters, slots.clamp(max=0))


class AddsToBareRows(Adding):
    """-1 is the last slot, as an index."""

    def add(self, y: torch.Tensor, x: torch.Tensor, adapters: Adapters, slots: torch.Tensor) -> None:
        super().add(y, x, adapters, slots % len(adapters[0]))


class TakesTheFirstPart(Adding):
    def inner(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().inner(a[:1].expand_as(a), x)


class RoundsInnerProducts(Adding):
    def inner(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().inner(a, x).to(x.dtype).double()


class RoundsToTheAdapters(Adding):
    """Computes in the adapters' dtype."""

    def inner(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().inner(a, x.to(a.dtype))


class AddsToACopy(Adding):
    def add(self, y: torch.Tensor, x: torch.Tensor, adapters: Adapters, slots: torch.Tensor) -> None:
        super().add(y.clone(), x, adapters, slots)


class WritesWholeRows(Adding):
    """Takes rows to lie side by side."""

    def add(self, y: torch.Tensor, x: torch.Tensor, adapters: Adapters, slots: torch.Tensor) -> None:
        side_by_side = torch.as_strided(y, y.shape, (y.shape[1], 1), y.storage_offset())
        super().add(side_by_side, x, adapters, slots)


class MasksOtherSlots(Adding):
    """Multiplies by 0 what is not of a row's slot."""

    def add(self, y: torch.Tensor, x: torch.Tensor, adapters: Adapters, slots: torch.Tensor) -> None:
        for slot in range(len(adapters[0])):
            one = torch.zeros_like(y)
            super().add(one, x, adapters, torch.where(slots >= 0, slot, -1))
            y += one * (slots == slot)[:, None]


class AddsByBatch(Adding):
    """Scales by the largest number of the batch, and back."""

    def add(self, y: torch.Tensor, x: torch.Tensor, adapters: Adapters, slots: torch.Tensor) -> None:
        largest = x.abs().amax() if x.numel() else torch.ones((), dtype=x.dtype)
        scaled = torch.zeros_like(y, dtype=torch.float32)
        super().add(scaled, (x.float() / largest.float()), adapters, slots)
        y += torch.where((slots >= 0)[:, None], scaled * largest.float(), 0).to(y.dtype)


class Narrow(TorchOperators):
    """Serves the dtypes of models, without the one that shows every error."""

    capabilities = OperatorsCapabilities(device_types=None, dtypes=frozenset({"float32", "bfloat16"}))


class WithoutEpsilon(Narrow):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().rms_norm(x, weight, 0.0)


class SubtractsTheMean(Narrow):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, weight.shape, weight.to(x.dtype), None, eps)


class RoundsBeforeTheWeight(Narrow):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ones = torch.ones_like(weight)
        return super().rms_norm(x, ones, eps) * weight.to(x.dtype)


class OneForGemma(Narrow):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().rms_norm(x, weight + 1, eps)


class NormsInPlace(Narrow):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x.copy_(super().rms_norm(x, weight, eps))


class NormsAnUnroundedSum(Narrow):
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual.float() + x.float()
        return self.rms_norm(total, weight.float(), eps).to(x.dtype), total.to(x.dtype)


class ReturnsTheOldResidual(Narrow):
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rms_norm(residual + x, weight, eps), residual


class UpFirst(Narrow):
    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return super().silu_mul(torch.cat(gate_up.chunk(2, dim=-1)[::-1], dim=-1))


class Gelu(Narrow):
    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate) * up


class DividesInfinities(Narrow):
    """exp(-a) overflows far below zero."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        powers = (-gate.float()).exp()
        return (gate * (1 - powers / (1 + powers)) * up).to(gate.dtype)


class RotatesPairs(Narrow):
    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        size = cos.shape[-1]
        turned, rest = heads[..., :size], heads[..., size:]
        paired = turned.unflatten(-1, (2, size // 2)).transpose(-1, -2).flatten(-2)
        return torch.cat((super().rotate(paired, cos, sin), rest), dim=-1)


class RotatesWholeHeads(Narrow):
    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        size = cos.shape[-1]
        turned = super().rotate(heads[..., -size:], cos, sin)
        return torch.cat((heads[..., :-size], turned), dim=-1)


class OneBuffer(Narrow):
    """Answers from memory that the next call overwrites."""

    def __init__(self, options: PluginOptions):
        super().__init__(options)
        self.buffer = torch.empty(0)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        y = super().silu_mul(gate_up)
        if self.buffer.dtype != y.dtype or self.buffer.numel() < y.numel():
            self.buffer = torch.empty(y.numel(), dtype=y.dtype)
        return self.buffer[: y.numel()].view(y.shape).copy_(y)


class TakesOneRowFurther(Narrow):
    def take_rows(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return table[(ids + 1) % len(table)]


class MixesRows(Narrow):
    """Scales by the largest number of the batch, and back."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        largest = x.abs().amax().float().clamp(min=1e-30) if x.numel() else torch.ones(())
        wide = x.float() / largest
        norm = (wide.square().mean(dim=-1, keepdim=True) + eps / largest**2).rsqrt()
        return (wide * norm * weight.float()).to(x.dtype).contiguous()


class RefusesInSilence(Narrow):
    @classmethod
    def check(cls, need: OperatorsNeed, options: PluginOptions, environment: Environment) -> list[str]:
        return ["", *super().check(need, options, environment)] if need.dtype == "bfloat16" else []


FAULTS = [
    Fault("norms without epsilon", WithoutEpsilon, "test_rms_norm_of_nothing_and_of_small_numbers"),
    Fault("subtracts the mean", SubtractsTheMean, "test_rms_norm"),
    Fault("rounds before it multiplies by the weight", RoundsBeforeTheWeight, "test_rms_norm"),
    Fault("adds 1 to the weight", OneForGemma, "test_rms_norm"),
    Fault("norms in place", NormsInPlace, "test_rms_norm"),
    Fault("norms the sum before it is rounded", NormsAnUnroundedSum, "test_add_rms_norm"),
    Fault("returns the residual without what was added", ReturnsTheOldResidual, "test_add_rms_norm"),
    Fault("takes the gate for the factor", UpFirst, "test_silu_mul"),
    Fault("takes gelu for silu", Gelu, "test_silu_mul"),
    Fault("divides what overflows", DividesInfinities, "test_silu_mul_far_from_zero"),
    Fault("rotates neighbours", RotatesPairs, "test_rotate"),
    Fault("rotates the last elements of a head", RotatesWholeHeads, "test_rotate"),
    Fault("answers from one buffer", OneBuffer, "test_results_stay_as_they_are"),
    Fault("takes the row behind", TakesOneRowFurther, "test_take_rows"),
    Fault("lets rows depend on each other", MixesRows, "test_rows_do_not_depend_on_the_batch"),
    Fault("refuses without a reason", RefusesInSilence, "test_check_gives_reasons_in_sentences"),
    Fault("cuts ties", CutsTies, "test_draw"),
    Fault("draws what was not kept", DrawsTheNext, "test_draw_at_the_ends"),
    Fault("multiplies all groups with one matrix", OneMatrix, "test_grouped_linear"),
    Fault("accepts all drafts", AcceptsAll, "test_accept_chains"),
    Fault("adds one adapter to all rows", AddsOneAdapterToAll, "test_add_low_rank"),
    Fault("adds an adapter to rows without one", AddsToBareRows, "test_add_low_rank"),
    Fault("takes the first part of an adapter for all", TakesTheFirstPart, "test_add_low_rank"),
    Fault("adds adapters to a copy", AddsToACopy, "test_add_low_rank"),
    Fault("takes rows to lie side by side", WritesWholeRows, "test_add_low_rank_to_rows_of_wider_ones"),
    Fault("rounds inner products", RoundsInnerProducts, "test_add_low_rank_rounds_once"),
    Fault("rounds rows to the adapters' dtype", RoundsToTheAdapters, "test_add_low_rank_of_narrower_adapters"),
    Fault("masks adapters of other slots", MasksOtherSlots, "test_adapters_of_other_slots_do_not_matter"),
    Fault("lets adapted rows depend on each other", AddsByBatch, "test_adapted_rows_do_not_depend_on_the_batch"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_set_that(fault: Fault) -> None:
    check_fault(fault, OperatorsSuite, plugin=fault.plugin)


class TestWhole(OperatorsSuite):
    plugin = Whole


class TestNarrow(OperatorsSuite):
    plugin = Narrow
