"""The target's rows behind drafts: of all requests at once what they are one by one, in groups that stay small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.operators import AcceptsChains, Operators
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import AcceptanceRule, Draft, TargetView, targets_of
from dovetail.contracts.step import NewRequest
from dovetail.nn.operators import TorchOperators
from dovetail.spec_decode.rejection import RejectionRule
from dovetail.spec_decode.typical import TypicalRule
from dovetail.testing.acceptance_suite import verify_request
from dovetail.testing.chain_cases import Chains
from dovetail.worker.sampling import draw as drawing
from dovetail.worker.sampling.sampler import Sampler
from dovetail.worker.sampling.temperature import normalized, truncated_weights
from dovetail.worker.speculation.draft_sampling import TargetRows, draft_distributions, draft_draw
from dovetail.worker.speculation.rules import Rules
from dovetail.worker.speculation.verifier import DraftedRequest, Verifier

VOCAB = 300
SAMPLING = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, top_p=0.7),
    SamplingParams(temperature=1.0, top_k=40, min_p=0.01),
]


def new_sampler(params: Sequence[SamplingParams]) -> Sampler:
    sampler = Sampler(VOCAB, max(1, len(params)))
    for seq_id, sampling in enumerate(params):
        sampler.add(NewRequest(seq_id, str(seq_id), [1, 2], 2, 0, ([],), sampling, seq_id))
    return sampler


def one_row(row: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """A row's distribution in the words of the parameters, with no other in the batch."""
    if sampling.is_greedy:
        return torch.nn.functional.one_hot(row.argmax(), VOCAB).float()
    top_k = sampling.top_k if sampling.top_k > 0 else VOCAB
    weights = truncated_weights(
        row[None],
        temperature=torch.tensor([sampling.temperature]),
        min_p=torch.tensor([sampling.min_p]),
        top_k=torch.tensor([top_k]),
        top_p=torch.tensor([sampling.top_p], dtype=torch.float64),
    )
    return normalized(weights)[0]


@given(
    params=st.lists(st.sampled_from(SAMPLING), min_size=1, max_size=5),
    sizes=st.lists(st.integers(1, 4), min_size=5, max_size=5),
    rows_at_once=st.integers(1, 9),
    damaged=st.integers(0, 30),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_rows_of_many_requests_are_those_of_each(
    params: list[SamplingParams], sizes: list[int], rows_at_once: int, damaged: int, data: st.DataObject
) -> None:
    owners = [seq_id for seq_id, size in zip(range(len(params)), sizes, strict=False) for _ in range(size)]
    logits = torch.randn(len(owners), VOCAB, generator=torch.Generator().manual_seed(damaged)) * 3
    if damaged < len(owners):
        logits[damaged, 5] = torch.nan
    positions = np.full(len(owners), 2)
    target = TargetRows(new_sampler(params), logits, owners, positions, [()] * len(owners))
    chosen = data.draw(st.lists(st.integers(0, len(owners) - 1), min_size=1, unique=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "_ENTRIES_ON_CPU", rows_at_once * VOCAB)
        together = target.probs(np.array(chosen))
    for found, row in zip(together, chosen, strict=True):
        assert torch.equal(found, target.probs(np.array([row]))[0])
        expected = torch.zeros(VOCAB) if row == damaged else one_row(logits[row], params[owners[row]])
        assert torch.equal(found, expected)


class ChainOperators(TorchOperators, AcceptsChains):
    """Accepts chains one by one, in the words of the contract."""

    def accept_chains(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        accepted, tokens = torch.tensor(Chains(*arguments).expected()).unbind(1)
        return accepted, tokens


class Separate(TargetView):
    """The rows of one request, computed by themselves."""

    def __init__(self, view: TargetView):
        self._view = view

    def probs(self) -> torch.Tensor:
        return self._view.probs()

    def tokens(self) -> Sequence[int]:
        return self._view.tokens()

    def joined(self, views: Sequence[TargetView]) -> torch.Tensor:
        return torch.cat([view.probs() for view in views])


class ByRequest(RejectionRule):
    """Has rows request by request."""

    def verify(self, requests: Sequence[Any]) -> Sequence[Any]:
        return super().verify([replace(request, target=Separate(request.target)) for request in requests])


def drawn_drafts(num_requests: int, seed: int, *, trees: bool) -> list[DraftedRequest]:
    random = np.random.default_rng(seed)
    drafted = []
    for seq_id in range(num_requests):
        count = int(random.integers(0, 5))
        probs = torch.from_numpy(random.dirichlet(np.full(VOCAB, 0.05), count)).float().view(count, VOCAB)
        tokens = [int(random.choice(VOCAB, p=row.double().numpy() / float(row.double().sum()))) for row in probs]
        parents = [int(random.integers(-1, i)) for i in range(count)] if trees and seq_id % 2 else None
        drafted.append(DraftedRequest(seq_id, 2, Draft(tokens, parents, probs)))
    return drafted


@pytest.mark.parametrize("operators", [None, ChainOperators(PluginOptions())], ids=["plain", "operators"])
@given(
    seed=st.integers(0, 10_000), params=st.lists(st.sampled_from(SAMPLING), min_size=1, max_size=6), trees=st.booleans()
)
@settings(max_examples=40, deadline=None)
def test_verdicts_are_those_of_rows_computed_request_by_request(
    operators: Operators | None, seed: int, params: list[SamplingParams], trees: bool
) -> None:
    drafted = drawn_drafts(len(params), seed, trees=trees)
    num_rows = sum(len(request.draft.token_ids) + 1 for request in drafted)
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    found = []
    for rule in (RejectionRule(PluginOptions()), ByRequest(PluginOptions())):
        if operators is not None:
            rule.use_operators(operators)
        output = Verifier(Rules(rule), new_sampler(params)).verify(logits, drafted)
        assert not output.faults
        found.append((output.accepted, output.token_ids))
    assert found[0] == found[1]


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("rule_class", [RejectionRule, TypicalRule])
@pytest.mark.parametrize("operators", [None, ChainOperators(PluginOptions())], ids=["plain", "operators"])
def test_rows_of_a_step_are_computed_together(
    rule_class: type[AcceptanceRule], operators: Operators | None, trees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each computation of rows may stop the host of a GPU. At most once for chains and once for the rest."""
    calls = []
    compute = drawing.truncated_weights

    def counted(logits: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        calls.append(len(logits))
        return compute(logits, *arguments, **keywords)

    rule = rule_class(rule_class.Options())
    if operators is not None:
        rule.use_operators(operators)
    drafted = [request for request in drawn_drafts(24, 3, trees=trees) if len(request.draft.token_ids)]
    num_rows = sum(len(request.draft.token_ids) + 1 for request in drafted)
    sampler = new_sampler([SAMPLING[2]] * 24)
    monkeypatch.setattr(drawing, "truncated_weights", counted)
    Verifier(Rules(rule), sampler).verify(torch.randn(num_rows, VOCAB), drafted)
    judged_apart = rule_class is RejectionRule and operators is not None and trees
    drawn = rule_class is TypicalRule  # of which the last token is drawn as without drafts
    assert len(calls) == 1 + judged_apart + drawn
    assert sum(calls) == num_rows * (1 + drawn)


def test_rows_that_are_given_request_by_request_are_joined() -> None:
    random = np.random.default_rng(0)
    targets = [torch.rand(count + 1, 5) for count in (2, 0, 3)]
    requests = [verify_request(Draft([0] * (len(target) - 1)), target, random, SamplingParams()) for target in targets]
    assert torch.equal(targets_of(requests), torch.cat(targets))


def test_what_is_computed_of_rows_is_computed_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the memory that it takes is bounded, whatever the number of rows; tokens and distributions stay the same."""
    largest = []
    compute = drawing.truncated_weights

    def counted(logits: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        largest.append(len(logits))
        return compute(logits, *arguments, **keywords)

    params = [SAMPLING[i % len(SAMPLING)] for i in range(40)]
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    seq_ids, positions = list(range(40)), np.full(40, 2)

    def results() -> list[torch.Tensor]:
        sampler = new_sampler(params)
        target = TargetRows(sampler, logits, seq_ids, positions, [()] * 40)
        probs = draft_distributions(logits, params)
        every = draft_distributions(logits[:20], [SAMPLING[1]] * 20)
        return [
            torch.from_numpy(sampler.sample(logits, seq_ids, positions).token_ids),
            torch.tensor(target.tokens(0, 40)),
            target.probs(np.arange(40)),
            probs,
            every,
            draft_draw(probs, np.random.default_rng(2).random(40)),
        ]

    expected = results()
    monkeypatch.setattr(drawing, "truncated_weights", counted)
    monkeypatch.setattr(drawing, "_ENTRIES_ON_CPU", 7 * VOCAB)
    for found, whole in zip(results(), expected, strict=True):
        assert torch.equal(found, whole)
    assert max(largest) == 7
