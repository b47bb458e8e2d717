from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import AcceptanceCapabilities, AcceptanceRule, Draft, Verdict, VerifyRequest
from dovetail.contracts.step import NewRequest
from dovetail.spec_decode.greedy import GreedyRule
from dovetail.spec_decode.rejection import RejectionRule
from dovetail.testing.acceptance_suite import SIGNIFICANCE, chi_square_p
from dovetail.worker.sampling.sampler import Sampler
from dovetail.worker.speculation.draft_sampling import draft_uniforms
from dovetail.worker.speculation.rules import Rules
from dovetail.worker.speculation.verifier import (
    DraftedRequest,
    Verifier,
    draft_paths,
    first_nodes,
)

VOCAB = 6
PROMPT = [1, 2]


def model(tokens: Sequence[int]) -> np.ndarray:
    """A toy language model: logits that depend on the last three tokens."""
    return np.random.default_rng([7, *tokens[-3:]]).normal(0, 1.5, VOCAB)


def new_request(seq_id: int, params: dict[str, Any], seed: int = 11) -> NewRequest:
    bad_words = params.get("bad_word_ids", ())
    sampling = SamplingParams(**{"max_tokens": None, **{k: v for k, v in params.items() if k != "bad_word_ids"}})
    return NewRequest(seq_id, str(seq_id), list(PROMPT), 2, 0, ([],), sampling, seed, (0,), bad_word_ids=bad_words)


def plain(params: dict[str, Any], count: int, seed: int) -> list[int]:
    """Tokens drawn one by one."""
    sampler = Sampler(VOCAB, 1)
    sampler.add(new_request(1, params, seed))
    tokens = list(PROMPT)
    while len(tokens) < 2 + count:
        logits = torch.from_numpy(model(tokens)).float()[None]
        tokens.append(int(sampler.sample(logits, [1], np.array([len(tokens)])).token_ids[0]))
    return tokens[2:]


def rows_of(tokens: Sequence[int], draft: Draft) -> torch.Tensor:
    """What a forward pass over the last known token and its drafts gives."""
    return torch.from_numpy(np.array([model([*tokens, *path]) for path in draft_paths(draft)])).float()


def speculative(
    rule: AcceptanceRule, params: dict[str, Any], count: int, seed: int, guess: Callable[[list[int]], Draft]
) -> tuple[list[int], int]:
    """Tokens committed in rounds, and how many of them were drafts."""
    sampler = Sampler(VOCAB, 1)
    sampler.add(new_request(1, params, seed))
    verifier = Verifier(Rules(rule), sampler)
    tokens, accepted = list(PROMPT), 0
    while len(tokens) < 2 + count:
        draft = guess(tokens)
        output = verifier.verify(rows_of(tokens, draft), [DraftedRequest(1, len(tokens), draft)])
        assert not output.failed
        tokens += output.token_ids[0]
        accepted += len(output.accepted[0])
    return tokens[2 : 2 + count], accepted


def random_guesses(seed: int, *, trees: bool) -> Callable[[list[int]], Draft]:
    random = np.random.default_rng(seed)

    def guess(tokens: list[int]) -> Draft:
        count = int(random.integers(0, 7))
        parents = [int(random.integers(-1, i)) for i in range(count)] if trees else None
        return Draft(random.integers(0, VOCAB, count).tolist(), parents)

    return guess


PARAMS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"min_tokens": 9, "stop_token_ids": [4], "logit_bias": {0: 2.0, 4: 2.0}},
    {"bad_word_ids": ((3, 5), (5, 5, 1), (2,))},
    {"processors": {}, "allowed_token_ids": [0, 1, 3, 5]},
]


@given(
    params=st.sampled_from(PARAMS),
    seed=st.integers(0, 10_000),
    trees=st.booleans(),
    rule=st.sampled_from([GreedyRule, RejectionRule]),
)
@settings(max_examples=60, deadline=None)
def test_greedy_tokens_are_those_of_plain_decoding(
    params: dict[str, Any], seed: int, trees: bool, rule: type[AcceptanceRule]
) -> None:
    params = {**params, "temperature": 0}
    expected = plain(params, 24, seed)
    tokens, _ = speculative(rule(PluginOptions()), params, 24, seed, random_guesses(seed, trees=trees))
    assert tokens == expected


@given(params=st.sampled_from(PARAMS), seed=st.integers(0, 10_000), trees=st.booleans())
@settings(max_examples=40, deadline=None)
def test_seeded_requests_keep_their_tokens_under_fixed_drafts(params: dict[str, Any], seed: int, trees: bool) -> None:
    # The drafter has no probabilities to give, so a round draws what plain sampling would have drawn.
    params = {**params, "temperature": 0.9, "top_p": 0.95}
    rule = RejectionRule(PluginOptions())
    tokens, _ = speculative(rule, params, 24, seed, random_guesses(seed, trees=trees))
    assert tokens == plain(params, 24, seed)


def test_good_drafts_stand() -> None:
    params = {"temperature": 0}
    expected = plain(params, 24, 0)

    def oracle(tokens: list[int]) -> Draft:
        known = len(tokens) - 2
        return Draft(expected[known : known + 4])

    tokens, accepted = speculative(GreedyRule(PluginOptions()), params, 24, 0, oracle)
    assert tokens == expected
    assert accepted == 20  # five rounds of 4; the last bonus token lies beyond the 24th


@pytest.mark.parametrize(
    "trees", [pytest.param(False, id="chain", marks=pytest.mark.nightly), pytest.param(True, id="tree")]
)
def test_drawn_drafts_keep_the_joint_distribution_over_rounds(trees: bool) -> None:
    # The streams of drafting, acceptance and sampling are the sampler's own here: a value used twice would show.
    # 5,000 sequences of 3 tokens over a vocabulary of 3: 27 cells. 0.05 of probability moved between two first
    # tokens has a noncentrality of 5000 * 0.05**2 * 2 / 0.4 = 62 or more, found with a power above 0.95.
    vocab_size, num_requests = 3, 5000
    random = np.random.default_rng(0)
    table = random.dirichlet(np.full(vocab_size, 2.0), size=(vocab_size, vocab_size))
    q = np.array([0.5, 0.3, 0.2])
    sampler = Sampler(vocab_size, num_requests)
    for seq_id in range(num_requests):
        request = NewRequest(seq_id, str(seq_id), [0, 0], 2, 0, ([],), SamplingParams(max_tokens=None), seq_id)
        sampler.add(request)
    verifier = Verifier(Rules(RejectionRule(PluginOptions())), sampler)
    parents = [-1, -1, 0] if trees else [-1, 0]
    known = [[0, 0] for _ in range(num_requests)]
    while pending := [seq_id for seq_id in range(num_requests) if len(known[seq_id]) < 5]:
        drafted, rows = [], []
        for seq_id in pending:
            u = draft_uniforms(sampler, [seq_id], np.array([len(known[seq_id])]), len(parents))[0]
            draft = _drawn(q, parents, u)
            drafted.append(DraftedRequest(seq_id, len(known[seq_id]), draft))
            rows += [table[tuple([*known[seq_id], *path][-2:])] for path in draft_paths(draft)]
        output = verifier.verify(torch.from_numpy(np.array(rows)).log().float(), drafted)
        for seq_id, tokens in zip(pending, output.token_ids, strict=True):
            known[seq_id] += tokens
    counts, expected = np.zeros(27, dtype=np.int64), np.zeros(27)
    for tokens in known:
        counts[tokens[2] * 9 + tokens[3] * 3 + tokens[4]] += 1
    for a, b, c in np.ndindex(3, 3, 3):
        expected[a * 9 + b * 3 + c] = num_requests * table[0, 0, a] * table[0, a, b] * table[a, b, c]
    assert chi_square_p(counts, expected) > SIGNIFICANCE


def _drawn(q: np.ndarray, parents: list[int], uniforms: np.ndarray) -> Draft:
    """A draft drawn with the given uniforms, siblings without replacement."""
    tokens: list[int] = []
    probs = np.tile(q, (len(parents), 1))
    for node, parent in enumerate(parents):
        probs[node, [tokens[i] for i in range(node) if parents[i] == parent]] = 0
        probs[node] /= probs[node].sum()
        tokens.append(int(np.searchsorted(probs[node].cumsum(), uniforms[node], side="right")))
    return Draft(tokens, parents, torch.from_numpy(probs).float())


def test_logprobs_belong_to_the_rows_that_gave_the_tokens() -> None:
    sampler = Sampler(VOCAB, 2)
    sampler.add(new_request(1, {"temperature": 0, "logprobs": 2, "logit_bias": {1: 3.0}}))
    sampler.add(new_request(2, {"temperature": 0}))
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(0))
    best = (logits + 3.0 * torch.eye(VOCAB)[1]).argmax(-1).tolist()
    # Node 2 hangs below node 1, so the tokens come from rows 0, 2 and 3 of the first request.
    draft = Draft([(best[0] + 1) % VOCAB, best[0], best[2]], [-1, -1, 1])
    output = Verifier(Rules(GreedyRule(PluginOptions())), sampler).verify(
        logits, [DraftedRequest(1, 2, draft), DraftedRequest(2, 2, Draft([0, 0]))]
    )
    assert output.accepted[0] == [1, 2]
    assert output.token_ids[0] == [best[0], best[2], best[3]]
    assert list(output.logprobs) == [0]
    for row, entry in zip([0, 2, 3], output.logprobs[0], strict=True):
        expected = logits[row].log_softmax(-1)
        assert entry.token_id == best[row]
        assert entry.logprob == pytest.approx(float(expected[best[row]]), abs=1e-6)
        assert entry.top_ids == expected.topk(2).indices.tolist()


def test_a_damaged_row_matters_only_below_an_accepted_draft() -> None:
    for token, fails in ((4, True), (3, False)):
        sampler = Sampler(VOCAB, 2)
        for seq_id in range(2):
            sampler.add(new_request(seq_id, {"temperature": 0}))
        logits = torch.zeros(4, VOCAB)
        logits[0, 4] = logits[2, 5] = 1.0
        logits[1] = torch.nan
        output = Verifier(Rules(RejectionRule(PluginOptions())), sampler).verify(
            logits, [DraftedRequest(0, 2, Draft([token])), DraftedRequest(1, 2, Draft([0]))]
        )
        assert (list(output.failed) == [0]) is fails
        assert output.token_ids == [[] if fails else [4], [5]]


class FixedRule(AcceptanceRule):
    """Answers what it was given, or raises it."""

    contract = (1, 0)
    capabilities = AcceptanceCapabilities(sampling=True)

    def __init__(self, answer: Any):
        super().__init__(PluginOptions())
        self.answer = answer

    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        if isinstance(self.answer, Exception):
            raise self.answer
        answer: Sequence[Verdict] = self.answer
        return answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (RuntimeError("no idea"), "FixedRule failed: RuntimeError: no idea"),
        ([], "0 verdicts for 1 requests"),
        ([Verdict([1], 0)], "node 1 is accepted after node -1, but its parent is 0"),
        ([Verdict([0, 1, 2], 0)], "node 2 of 2"),
        ([Verdict([0], VOCAB)], "token id 6 lies outside the vocabulary"),
        ([None], "it is a NoneType, not a Verdict"),
        ([Verdict(["0"], 1)], "accepted: a str is no int"),  # type: ignore[list-item]
        (None, "FixedRule failed: TypeError"),
    ],
)
def test_a_faulty_rule_costs_the_drafts_and_says_so(answer: Any, message: str) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    # A presence penalty makes the sampler follow the output, so a token recorded twice or never would be noticed.
    params = {"temperature": 1.0, "presence_penalty": 0.5, "logprobs": 1}
    sampler, plain = Sampler(VOCAB, 1), Sampler(VOCAB, 1)
    for either in (sampler, plain):
        either.add(new_request(1, params))
    output = Verifier(Rules(FixedRule(answer)), sampler).verify(logits, [DraftedRequest(1, 2, Draft([3, 4]))])
    expected = plain.sample(logits[:1], [1], np.array([2]))
    assert output.token_ids == [expected.token_ids.tolist()]
    assert output.logprobs[0] == [expected.logprobs[0]]
    assert message in output.faults[0]
    assert (output.failed, output.accepted) == ({}, [[]])
    again = [either.sample(logits[1:2], [1], np.array([3])).token_ids.tolist() for either in (sampler, plain)]
    assert again[0] == again[1]


def test_drafts_that_a_rule_does_not_serve_are_dropped_alone() -> None:
    sampler = Sampler(VOCAB, 2)
    sampler.add(new_request(0, {"temperature": 1.0}))
    sampler.add(new_request(1, {"temperature": 0}))
    drafted = [DraftedRequest(0, 2, Draft([3])), DraftedRequest(1, 2, Draft([0]))]
    output = Verifier(Rules(GreedyRule(PluginOptions())), sampler).verify(torch.zeros(4, VOCAB), drafted)
    assert output.faults == {0: "acceptance rule GreedyRule serves temperature 0 only"}
    assert len(output.token_ids[0]) == 1
    assert output.token_ids[1] == [0, 0]
    tree = [DraftedRequest(1, 4, Draft([3, 4], [-1, -1]))]
    output = Verifier(Rules(FixedRule([])), sampler).verify(torch.zeros(3, VOCAB), tree)
    assert "judges chains only" in output.faults[0]


def test_drafts_are_cut_to_their_first_nodes() -> None:
    tree = Draft([1, 2, 3], [-1, 0, 0], torch.ones(3, VOCAB) / VOCAB, [0.5, 0.4, 0.3])
    cut = first_nodes(tree, 2)
    assert (cut.token_ids, cut.parents, cut.confidence) == ([1, 2], [-1, 0], [0.5, 0.4])
    assert cut.probs is not None
    assert cut.probs.shape == (2, VOCAB)
    assert first_nodes(tree, 5) is tree
