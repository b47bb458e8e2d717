"""Conformance suites of draft workers and acceptance rules. A third party's test is a subclass::

    from dovetail.testing.draft_suite import AcceptanceRuleSuite

    class TestMyRule(AcceptanceRuleSuite):
        rule_class = MyRule

The statistical checks are deterministic: every random number comes from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import (
    AcceptanceRule,
    Draft,
    DraftBatch,
    DraftRequest,
    DraftSetup,
    DraftWorker,
    SpeculationNeed,
    Verdict,
    VerifyRequest,
)
from dovetail.runner.draft_sampling import draft_distributions, draft_draw
from dovetail.testing.draft_rounds import (
    HostBatch,
    RequestStep,
    Talk,
    as_lists,
    assert_same_draft,
    first_path,
    places_in,
    text,
)

NUM_ROUNDS = 10_000
"""Rounds per check of a distribution. If 0.035 of probability moves from one first token to another, the chi-square
statistic (14 degrees of freedom) has noncentrality 10000 * 0.035**2 * (1 / 0.5 + 1 / 0.3) = 65 or more, and is found at
`SIGNIFICANCE` with a power of 0.99."""
SIGNIFICANCE = 1e-3


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


MAX_SEQS = 8
"""Requests of the largest batch of draft workers."""

DRAWS = 1600
"""Drafts per check that nodes are drawn as reported, over `GRID` times `GRID` cells for each pair of nodes (35 degrees
of freedom). A fault that moves a share d of probability between two halves of the cells has noncentrality
1600 * (2 d)**2: from d = 0.11 on it is found at `SIGNIFICANCE` with a power of 0.99."""
GRID = 6


class DraftWorkerSuite:
    """What every draft worker must do."""

    worker_class: ClassVar[type[DraftWorker]]
    options: ClassVar[Mapping[str, Any]] = {}
    vocab_size: ClassVar[int] = 50
    hidden_size: ClassVar[int] = 8
    num_tokens: ClassVar[int] = 4
    num_layers: ClassVar[int] = 4
    """Of the target, for drafters that look between its layers."""
    num_draws: ClassVar[int] = DRAWS
    """Drafts per check of what they are drawn from; see `DRAWS`."""

    def setup(self) -> DraftSetup:
        """A random target's embeddings."""
        torch.manual_seed(0)
        return DraftSetup(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            max_model_len=256,
            max_num_seqs=MAX_SEQS,
            num_tokens=self.num_tokens,
            device=torch.device("cpu"),
            dtype=torch.float32,
            embed=torch.nn.Embedding(self.vocab_size, self.hidden_size).requires_grad_(False),
            compute_logits=torch.nn.Linear(self.hidden_size, self.vocab_size, bias=False).requires_grad_(False),
            num_layers=self.num_layers,
            distributions=draft_distributions,
            draw=draft_draw,
            wants_confidence=self.worker_class.capabilities.confidence,
        )

    def create(self) -> DraftWorker:
        """A fresh worker."""
        return self.worker_class(self._options(), self.setup())

    def _options(self) -> PluginOptions:
        return self.worker_class.Options.model_validate(dict(self.options))

    def need(self) -> SpeculationNeed:
        """What the suite asks of the drafter."""
        return SpeculationNeed(
            device_type="cpu",
            dtype="float32",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            tensor_parallel=1,
            num_tokens=self.num_tokens,
            num_layers=self.num_layers,
            kv_dtype="float32",
            gives_hidden_layers=True,
        )

    def batch(
        self,
        num_requests: int,
        max_drafts: int | None = None,
        num_known: int = 40,
        first: int = 0,
        end: int | None = None,
        known: NDArray[np.int32] | None = None,
    ) -> DraftBatch:
        """Requests whose tokens repeat themselves, `num_known` of them known, or those of `known`. The step has
        computed the positions from `first` to `end` (without it: all but the last known token), each of which has the
        same states in any batch."""
        steps = []
        for key in range(num_requests):
            phrase = np.random.default_rng(key).integers(0, self.vocab_size, 7, dtype=np.int32)
            tokens = np.resize(phrase, num_known) if known is None else known
            count = self.num_tokens if max_drafts is None else max_drafts
            steps.append(RequestStep(key, tokens.tolist(), first, num_known - 1 if end is None else end, count))
        return self.batch_of(steps).batch

    def batch_of(self, steps: Sequence[RequestStep]) -> HostBatch:
        """A batch in arrays of its own."""
        requests: list[DraftRequest] = []
        states: list[torch.Tensor] = []
        shape, num_rows = (128, self.num_layers + 1, self.hidden_size), 0
        for step in steps:
            tokens = np.array(step.token_ids, dtype=np.int32)
            count = step.end - step.first
            view = tokens[:]
            view.flags.writeable = False
            requests.append(
                DraftRequest(
                    key=step.key,
                    token_ids=view,
                    num_prompt_tokens=step.num_prompt_tokens or max(1, len(tokens) - 5),
                    max_drafts=step.max_drafts,
                    sampling=step.sampling(),
                    hidden_rows=np.arange(num_rows, num_rows + count),
                    uniforms=step.stream(),
                    first_position=step.first,
                )
            )
            num_rows += count
            # numpy's rows do not depend on how many are drawn, torch's do.
            drawn = np.random.default_rng(step.chosen_seed).standard_normal(shape, np.float32)
            states.append(torch.from_numpy(drawn)[step.first : step.end])
        whole = torch.cat(states)
        layers = list(self.worker_class.hidden_layers(self._options(), self.need()))
        batch = DraftBatch(
            requests,
            whole[:, -1].contiguous() if self.worker_class.capabilities.needs_hidden_states else None,
            whole[:, layers].flatten(1) if layers else None,
        )
        return HostBatch(batch)

    def test_declares_its_contract(self) -> None:
        """The host can tell which contract the class was written for."""
        assert self.worker_class.contract[0] == 1

    def test_answers_every_request_with_a_well_formed_draft(self) -> None:
        """One answer per request; token ids, parents and probabilities as the capabilities promise."""
        batch = self.batch(3)
        drafts = self.create().propose(batch)
        assert len(drafts) == 3
        for draft in drafts:
            self.check(draft, self.num_tokens)

    def test_keeps_to_max_drafts(self) -> None:
        """A request near its end gets no more nodes than it can use."""
        for count in (0, 1, 2):
            for draft in self.create().propose(self.batch(2, max_drafts=count)):
                self.check(draft, count)

    def test_serves_short_requests(self) -> None:
        """The shortest prompt is one token; what follows it is known as well when guesses are wanted."""
        for num_known in (2, 3, 6):
            for draft in self.create().propose(self.batch(2, num_known=num_known)):
                self.check(draft, self.num_tokens)

    def test_repeats_itself(self) -> None:
        """The same requests with the same uniforms give the same drafts."""
        workers = [self.create() for _ in range(2)]
        first, second = (worker.propose(self.batch(3)) for worker in workers)
        assert [as_lists(draft) for draft in first] == [as_lists(draft) for draft in second]

    def test_gives_a_request_the_same_draft_in_any_batch(self) -> None:
        """Other requests in the batch change nothing."""
        together = self.create().propose(self.batch(3))
        for key in range(3):
            request = self.batch(3).requests[key]
            step = RequestStep(key, request.token_ids.tolist(), 0, len(request.token_ids) - 1, self.num_tokens)
            assert_same_draft(together[key], self.create().propose(self.batch_of([step]).batch)[0])

    def test_requests_that_run_side_by_side_do_not_meet(self) -> None:
        """Rounds of three requests that share text, with verdicts of every kind, and some left out of some batches:
        each gets the drafts that it gets alone. What a batch held is overwritten before the next call."""
        together = self._converse(range(3))
        for key in range(3):
            alone = self._converse([key], overwrites=False)[key]
            for round_id, (draft, expected) in enumerate(zip(together[key], alone, strict=True)):
                assert draft == expected, f"request {key} in its round {round_id}"

    def _converse(self, keys: Sequence[int], overwrites: bool = True) -> dict[int, list[Any]]:
        """Drafts of each request, round by round: the second writes what the first has written, the third its own."""
        worker = self.create()
        talks = {key: Talk(key, self.text(7 if key == 2 else None, seed=key // 2), 30 - 8 * key) for key in keys}
        for present in ((0, 1, 2), (0, 2), (0, 1, 2), (1,), (0, 1, 2), (2, 1, 0)):
            rows = [talks[key] for key in present if key in talks]
            if not rows:
                continue
            for talk in rows:
                talk.advance(worker)
            host = self.batch_of([talk.step(self.num_tokens) for talk in rows])
            for talk, draft in zip(rows, worker.propose(host.batch), strict=True):
                self.check(draft, self.num_tokens)
                talk.take(draft)
            if overwrites:
                host.overwrite()
        return {key: talk.drafts for key, talk in talks.items()}

    def text(self, period: int | None = None, seed: int = 0) -> list[int]:
        """120 tokens, see `draft_rounds.text`."""
        return text(self.vocab_size, period, seed)

    def test_takes_in_prompts_that_are_not_complete(self) -> None:
        """Steps that compute part of a prompt, after which nothing is to be guessed, and then the rest."""
        if self.worker_class.capabilities.stateless:
            pytest.skip(f"{self.worker_class.__name__} is stateless: it is asked for drafts only")
        worker, tokens = self.create(), self.text(7)[:40]
        for first, end in ((0, 11), (11, 30)):
            steps = [RequestStep(key, tokens, first, end, 0, num_prompt_tokens=40) for key in range(2)]
            for draft in worker.propose(self.batch_of(steps).batch):
                self.check(draft, 0)
        tokens.append(3)
        steps = [RequestStep(key, tokens, 30, 40, self.num_tokens, num_prompt_tokens=40) for key in range(2)]
        for draft in worker.propose(self.batch_of(steps).batch):
            self.check(draft, self.num_tokens)

    def test_a_key_may_come_again(self) -> None:
        """Once its request ended, it names another one, which is new: it drafts as it would under any other key."""
        for tokens in (self.text()[:20], self.text(7)[:30]):
            drafts = []
            for key in (0, 6):
                step = RequestStep(key, tokens, 0, len(tokens) - 1, self.num_tokens, seed=0, is_sampled=True)
                drafts.append(self._taught().propose(self.batch_of([step]).batch)[0])
            assert_same_draft(*drafts)

    def _taught(self) -> DraftWorker:
        """A worker that has seen a request to its end, under key 0, and another that goes on."""
        worker = self.create()
        steps = [RequestStep(key, self.text(seed=key)[:60], 0, 59, self.num_tokens) for key in range(2)]
        worker.propose(self.batch_of(steps).batch)
        worker.on_finished(0, self.text()[:60])
        return worker

    def test_goes_on_after_verification_and_finish(self) -> None:
        """A round, its outcome (nothing stands, or the whole path), another round, the end, and the tokens again."""
        for stands in (False, True):
            worker = self.create()
            batch = self.batch(2)
            for draft, request in zip(worker.propose(batch), batch.requests, strict=True):
                if draft is not None and len(draft.token_ids):
                    worker.on_verified(request.key, first_path(draft) if stands else [], len(draft.token_ids))
            worker.propose(batch)
            for request in batch.requests:
                worker.on_finished(request.key, request.token_ids.tolist())
            assert len(worker.propose(batch)) == 2

    def test_forgets_finished_requests(self) -> None:
        """What a request taught it is gone, so that it drafts like a new one, of texts that repeat themselves and of
        those that only a finished request could continue. Only of contract 1.3 or later."""
        if self.worker_class.contract < (1, 3):
            pytest.skip(f"{self.worker_class.__name__} speaks a contract before 1.3, which knows no forget_finished")
        worker = self._taught()
        worker.on_finished(1, self.text(seed=1)[:60])
        worker.forget_finished()
        fresh = self.create()
        texts = [self.text(7)[:40], self.text()[:20]]
        steps = [RequestStep(key, tokens, 0, len(tokens) - 1, self.num_tokens) for key, tokens in enumerate(texts)]
        drafts, expected = (each.propose(self.batch_of(steps).batch) for each in (worker, fresh))
        assert [as_lists(draft) for draft in drafts] == [as_lists(draft) for draft in expected]

    def test_drafts_are_drawn_from_the_distributions_that_come_with_them(self) -> None:
        """Each node with a uniform of its own. By a chi-square test; `DRAWS` says what it finds."""
        if not self.worker_class.capabilities.probabilities:
            pytest.skip(f"{self.worker_class.__name__} does not declare probabilities")
        places = self.drawn_places(self.num_draws)
        for one in range(places.shape[1]):
            for other in range(one):
                p_value = uniform_pair_p(places[:, other], places[:, one])
                assert p_value > SIGNIFICANCE, f"nodes {other} and {one}: p = {p_value:.2g}"

    def drawn_places(self, num_draws: int, num_nodes: int = 3) -> NDArray[np.float64]:
        """[num_draws, num_nodes]: where each of a request's first drafts lies in its distribution, likely tokens first,
        as a number that is uniform in [0, 1) if it was drawn from it; NaN where there was no such node."""
        worker, tokens = self.create(), self.text(7)[:20]
        random = np.random.default_rng(5)
        places = np.full((num_draws, min(num_nodes, self.num_tokens)), np.nan)
        for start in range(0, num_draws, MAX_SEQS):
            steps = [
                RequestStep(key, tokens, 0, 19, self.num_tokens, seed=0, is_sampled=True, uniforms=uniforms)
                for key, uniforms in enumerate(random.random((MAX_SEQS, self.num_tokens)))
            ]
            for row, draft in enumerate(worker.propose(self.batch_of(steps).batch), start):
                if draft is None or row >= num_draws:
                    continue
                count = min(len(draft.token_ids), places.shape[1])
                probs = torch.eye(self.vocab_size)[list(draft.token_ids)] if draft.probs is None else draft.probs
                places[row, :count] = places_in(probs[:count].double().numpy(), draft.token_ids[:count], random)
        return places

    def test_hears_of_the_end_of_a_request_that_it_never_saw(self) -> None:
        """A request may end before its first proposal, and changes nothing for the others."""
        worker = self.create()
        worker.on_finished(99, [1, 2])
        assert as_lists(worker.propose(self.batch(1))[0]) == as_lists(self.create().propose(self.batch(1))[0])

    def check(self, draft: Draft | None, max_drafts: int) -> None:
        """Asserts that a draft is one that the runner can use."""
        if draft is None:
            return
        count = len(draft.token_ids)
        assert count <= max_drafts, f"{count} drafts where {max_drafts} are used"
        assert all(0 <= token < self.vocab_size for token in draft.token_ids), "token id outside the vocabulary"
        if draft.parents is not None:
            assert len(draft.parents) == count
            assert all(-1 <= parent < i for i, parent in enumerate(draft.parents)), "parents come before children"
        assert self.worker_class.capabilities.trees or not draft.is_tree, "a tree, but `trees` is not declared"
        declares = self.worker_class.capabilities
        if draft.confidence is not None:
            assert declares.confidence, "confidence, but `confidence` is not declared"
            assert len(draft.confidence) == count
            assert all(0 <= confidence <= 1 for confidence in draft.confidence)
        if draft.probs is None:
            assert draft.confidence is not None or not declares.confidence, "`confidence` is declared, but not given"
            return
        assert declares.probabilities, "probs, but `probabilities` is not declared"
        assert draft.probs.shape == (count, self.vocab_size)
        assert draft.probs.dtype == torch.float32
        assert bool((draft.probs >= 0).all())
        torch.testing.assert_close(draft.probs.sum(-1), torch.ones(count))
        chosen = draft.probs.gather(1, torch.as_tensor(draft.token_ids, dtype=torch.int64)[:, None])
        assert bool((chosen > 0).all()), "a draft that its own distribution cannot give"


class AcceptanceRuleSuite:
    """What every acceptance rule must do, as far as its class says that it does it."""

    rule_class: ClassVar[type[AcceptanceRule]]
    options: ClassVar[Mapping[str, Any]] = {}
    num_rounds: ClassVar[int] = NUM_ROUNDS
    """Rounds per check of a distribution; see `NUM_ROUNDS`."""

    def create(self) -> AcceptanceRule:
        """A fresh rule."""
        return self.rule_class(self.rule_class.Options.model_validate(dict(self.options)))

    def drafts(self) -> list[Draft]:
        """Every shape of draft that the rule says it serves, over 4 tokens."""
        chains = [Draft([]), Draft([2]), Draft([1, 1, 3])]
        trees = [Draft([0, 1, 2, 3, 0], [-1, -1, 0, 0, 3]), Draft([3, 2, 1], [-1, -1, -1])]
        return chains + (trees if self.rule_class.trees else [])

    def test_declares_its_contract(self) -> None:
        """The host can tell which contract the class was written for."""
        assert self.rule_class.contract[0] == 1

    def test_greedy_requests_get_the_best_tokens(self) -> None:
        """At temperature 0 the tokens are those that the target would choose one by one, and none more."""
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
        """Requests at temperature 1 over 6 tokens, of which each row of the target leaves some out, as masks and
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
            requests.append(request_over(draft, rows, SamplingParams(), uniforms[:count], uniforms[count:]))
        return requests

    def test_sampled_requests_get_possible_tokens(self) -> None:
        """At temperature 1, of lossy rules too: each accepted node, and the token that follows the last of them, has a
        probability above 0 in the target's row before it."""
        if self.rule_class.greedy_only:
            pytest.skip(f"{self.rule_class.__name__} is greedy_only")
        requests = self.sampled_requests()
        verdicts = self.create().verify(requests)
        assert len(verdicts) == len(requests)
        for request, verdict in zip(requests, verdicts, strict=True):
            check_path(request.draft, verdict)
            tokens = [*(request.draft.token_ids[node] for node in verdict.accepted), verdict.next_token_id]
            rows = [0, *(node + 1 for node in verdict.accepted)]
            for row, token in zip(rows, tokens, strict=True):
                assert float(request.target[row, token]) > 0, f"token {token} is impossible after row {row}"

    def test_sampled_requests_repeat_in_any_batch(self) -> None:
        """With the same uniforms a request gets the same verdict, whatever else is in the batch."""
        if self.rule_class.greedy_only:
            pytest.skip(f"{self.rule_class.__name__} is greedy_only")
        together = self.create().verify(self.sampled_requests(60))
        rule = self.create()
        for request, among in list(zip(self.sampled_requests(60), together, strict=True))[::-1]:
            (alone,) = rule.verify([request])
            assert (list(alone.accepted), alone.next_token_id) == (list(among.accepted), among.next_token_id)

    def test_lossless_rules_keep_the_distribution_of_chains(self) -> None:
        """The first two tokens are distributed as the target has it, with and without draft probabilities."""
        if self.rule_class.lossless and not self.rule_class.greedy_only:
            for has_probs in (True, False):
                p_value = chi_square_p(*self._counts([-1, 0], has_probs))
                assert p_value > SIGNIFICANCE, f"chain, probabilities {has_probs}: p = {p_value:.2g}"

    def test_lossless_rules_keep_the_distribution_of_trees(self) -> None:
        """The same for trees with siblings at both depths."""
        if self.rule_class.lossless and self.rule_class.trees and not self.rule_class.greedy_only:
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
    for _ in range(num_rounds):
        token_ids, probs = _draw_draft(parents, random, has_probs=has_probs)
        rows = [first]
        for node, token in enumerate(token_ids):
            # Below depth 1 any distribution will do, as the third token is not looked at.
            rows.append(second[token] if parents[node] < 0 else first)
        draft = Draft(token_ids, list(parents), torch.from_numpy(probs).float() if has_probs else None)
        requests.append(verify_request(draft, torch.from_numpy(np.array(rows)).float(), random, SamplingParams()))
    counts = np.zeros((4, 4), dtype=np.int64)
    for request, verdict in zip(requests, rule.verify(requests), strict=True):
        check_path(request.draft, verdict)
        tokens = [*(request.draft.token_ids[node] for node in verdict.accepted), verdict.next_token_id]
        if len(tokens) == 1:
            tokens.append(int(random.choice(4, p=second[tokens[0]])))
        counts[tokens[0], tokens[1]] += 1
    return counts.ravel(), (first[:, None] * second * num_rounds).ravel()


def _draw_draft(
    parents: Sequence[int], random: np.random.Generator, *, has_probs: bool
) -> tuple[list[int], NDArray[np.float64]]:
    """Tokens of a draft with these parents, and the distribution that each was drawn from given its elder siblings."""
    token_ids: list[int] = []
    probs = np.zeros((len(parents), 4))
    for node, parent in enumerate(parents):
        elder = [token_ids[other] for other in range(node) if parents[other] == parent]
        q = np.array([0.2, 0.2, 0.25, 0.35])
        q[elder] = 0
        probs[node] = q / q.sum()
        left = [token for token in range(4) if token not in elder]
        token_ids.append(int(random.choice(4, p=probs[node])) if has_probs else left[(node + parent + 1) % len(left)])
    return token_ids, probs


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

    def draw_target() -> list[int]:
        return draft_draw(target, recover_uniforms[[0, *draft.depths]]).tolist()

    return VerifyRequest(draft, lambda: target, draw_target, sampling, accept_uniforms, recover_uniforms)


def greedy() -> SamplingParams:
    """Temperature 0."""
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
    cells = (one[there] * GRID).astype(int) * GRID + (other[there] * GRID).astype(int)
    counts = np.bincount(cells, minlength=GRID * GRID)
    return chi_square_p(counts, np.full(GRID * GRID, len(cells) / GRID**2)) if len(cells) else 1.0
