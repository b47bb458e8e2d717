"""What the suite of draft workers finds: each a change in a drafter that passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import (
    Draft,
    DraftBatch,
    DraftCapabilities,
    DraftRequest,
    DraftSetup,
    DraftWorker,
    LearnsFromRequests,
)
from dovetail.testing.capabilities import Capability
from dovetail.testing.draft_suite import DraftWorkerSuite
from dovetail.testing.faults import Fault, check_fault, run_test
from dovetail.testing.hints import try_capability


@dataclass
class Pairs:
    """Which token followed each pair of tokens."""

    table: dict[tuple[int, int], int] = field(default_factory=dict)
    num_taken: int = 0

    def take(self, tokens: Sequence[int]) -> None:
        for i in range(max(2, self.num_taken), len(tokens)):
            self.table[tokens[i - 2], tokens[i - 1]] = tokens[i]
        self.num_taken = len(tokens)


class Lookup(LearnsFromRequests):
    """Guesses what followed the same two tokens before, in the request and in requests that ended."""

    contract = (1, 0)
    capabilities = DraftCapabilities(tensor_parallel=None)

    def __init__(self, options: PluginOptions, setup: DraftSetup):
        super().__init__(options, setup)
        self.states: dict[int, Pairs] = {}
        self.learned = Pairs()

    def state(self, seq_id: int) -> Pairs:
        return self.states.setdefault(seq_id, Pairs())

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        return [self.guess(request) for request in batch.requests]

    def guess(self, request: DraftRequest) -> Draft | None:
        tokens: list[int] = request.token_ids.tolist()
        state = self.state(request.seq_id)
        state.take(tokens)
        return self.continuation(tokens, state, request.max_drafts)

    def continuation(self, tokens: list[int], state: Pairs, count: int) -> Draft | None:
        guess: list[int] = []
        while len(guess) < count:
            last, token = (tokens + guess)[-2:]
            following = state.table.get((last, token), self.learned.table.get((last, token)))
            if following is None:
                break
            guess.append(following)
        return Draft(guess)

    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self.states.pop(seq_id, None)
        self.learned.take(token_ids)
        self.learned.num_taken = 0

    def forget_finished(self) -> None:
        self.learned = Pairs()


class LooksAtEmbeddings(Lookup):
    """Which no single rank holds."""

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        self.setup.embed(torch.tensor([request.token_ids[-1] for request in batch.requests]))
        return super().propose(batch)


class OneTable(Lookup):
    def state(self, seq_id: int) -> Pairs:
        state = super().state(seq_id)
        state.table = self.states.setdefault(-1, Pairs()).table
        return state


class KeepsState(Lookup):
    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self.learned.take(token_ids)


class ForgetsNothing(Lookup):
    def forget_finished(self) -> None:
        return


class LearnsInSecret(DraftWorker):
    """The same, and does not say so."""

    contract = (1, 0)

    def __init__(self, options: PluginOptions, setup: DraftSetup):
        super().__init__(options, setup)
        self.lookup = Lookup(options, setup)

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        return self.lookup.propose(batch)

    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self.lookup.on_finished(seq_id, token_ids)


class LearnsFromAll(Lookup):
    def guess(self, request: DraftRequest) -> Draft | None:
        draft = super().guess(request)
        self.learned.table.update(self.state(request.seq_id).table)
        return draft


class KeepsViews(Lookup):
    """Takes in what came when it is asked again."""

    def __init__(self, options: PluginOptions, setup: DraftSetup):
        super().__init__(options, setup)
        self.views: dict[int, np.ndarray] = {}

    def guess(self, request: DraftRequest) -> Draft | None:
        state = self.state(request.seq_id)
        if request.seq_id in self.views:
            state.take(self.views[request.seq_id].tolist())
        self.views[request.seq_id] = request.token_ids
        return self.continuation(request.token_ids.tolist(), state, request.max_drafts)


class WantsNothingAccepted(Lookup):
    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None:
        assert not accepted


class WantsCompletePrompts(Lookup):
    def guess(self, request: DraftRequest) -> Draft | None:
        assert len(request.token_ids) > request.num_prompt_tokens
        return super().guess(request)


class WantsEveryStep(Lookup):
    def guess(self, request: DraftRequest) -> Draft | None:
        num_taken = self.state(request.seq_id).num_taken
        assert not num_taken or len(request.token_ids) <= num_taken + self.setup.num_tokens + 1
        return super().guess(request)


class CountsRequests(Lookup):
    """Tells requests apart by their places in the batch."""

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        drafts = []
        for place, request in enumerate(batch.requests):
            tokens = request.token_ids.tolist()
            self.state(place).take(tokens)
            drafts.append(self.continuation(tokens, self.state(place), request.max_drafts))
        return drafts


class ServesTheFirst(Lookup):
    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        tokens = batch.requests[0].token_ids.tolist()
        self.state(batch.requests[0].seq_id).take(tokens)
        state = self.state(batch.requests[0].seq_id)
        return [self.continuation(tokens, state, request.max_drafts) for request in batch.requests]


class IgnoresMaxDrafts(Lookup):
    def continuation(self, tokens: list[int], state: Pairs, count: int) -> Draft | None:
        return super().continuation(tokens, state, self.setup.num_tokens)


class WantsToKnowWhoEnds(Lookup):
    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None:
        del self.states[seq_id]


class OutsideTheVocabulary(Lookup):
    def continuation(self, tokens: list[int], state: Pairs, count: int) -> Draft | None:
        return Draft([self.setup.vocab_size] * min(count, 1))


class ServesSix(Lookup):
    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        assert len(batch.requests) <= 6
        return super().propose(batch)


class ServesShortRequests(Lookup):
    """Up to 150 tokens."""

    def guess(self, request: DraftRequest) -> Draft | None:
        assert len(request.token_ids) <= 150
        return super().guess(request)


class ReversesTheBatch(Lookup):
    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        drafts = super().propose(batch)
        assert isinstance(batch.requests, list)
        batch.requests.reverse()
        return drafts


class UsesUniformsUp(Lookup):
    def guess(self, request: DraftRequest) -> Draft | None:
        request.uniforms.fill(0)
        return super().guess(request)


class SeedsGenerators(Lookup):
    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        np.random.seed(0)
        torch.manual_seed(0)
        return super().propose(batch)


class SeedsNumpy(Lookup):
    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        np.random.seed(0)
        return super().propose(batch)


NOT_ITS_OWN = "test_leaves_alone_what_is_not_its_own"
SIDE_BY_SIDE = "test_requests_that_run_side_by_side_do_not_meet"
LOOKUP_FAULTS = [
    Fault("declares ranks falsely", LooksAtEmbeddings, "test_drafts_over_as_many_ranks_as_it_declares"),
    Fault("keeps one table for all requests", OneTable, SIDE_BY_SIDE),
    Fault("learns from requests under way", LearnsFromAll, SIDE_BY_SIDE),
    Fault("keeps a view of the known tokens", KeepsViews, SIDE_BY_SIDE),
    Fault("tells requests apart by their places", CountsRequests, SIDE_BY_SIDE),
    Fault("wants to see a request in every step", WantsEveryStep, SIDE_BY_SIDE),
    Fault("raises where drafts were accepted", WantsNothingAccepted, SIDE_BY_SIDE),
    Fault("raises where drafts were accepted once", WantsNothingAccepted, "test_goes_on_after_verification_and_finish"),
    Fault("keeps the state of a request that ended", KeepsState, "test_a_key_may_come_again"),
    Fault("learns and does not say so", LearnsInSecret, "test_forgets_finished_requests"),
    Fault("forgets nothing that it learned", ForgetsNothing, "test_forgets_finished_requests"),
    Fault(
        "raises on prompts that are not complete", WantsCompletePrompts, "test_takes_in_prompts_that_are_not_complete"
    ),
    Fault("drafts for the first request only", ServesTheFirst, "test_gives_a_request_the_same_draft_in_any_batch"),
    Fault("ignores max_drafts", IgnoresMaxDrafts, "test_keeps_to_max_drafts"),
    Fault(
        "raises at the end of an unknown request",
        WantsToKnowWhoEnds,
        "test_hears_of_the_end_of_a_request_that_it_never_saw",
    ),
    Fault(
        "guesses outside the vocabulary", OutsideTheVocabulary, "test_answers_every_request_with_a_well_formed_draft"
    ),
    Fault("serves six requests of eight", ServesSix, "test_serves_as_many_requests_as_run_at_a_time"),
    Fault("raises on long requests", ServesShortRequests, "test_serves_requests_up_to_max_model_len"),
    Fault("turns the requests of the batch round", ReversesTheBatch, NOT_ITS_OWN),
    Fault("writes to the uniforms", UsesUniformsUp, NOT_ITS_OWN),
    Fault("seeds the random generators of numpy and torch", SeedsGenerators, NOT_ITS_OWN),
    Fault("seeds the random generator of numpy", SeedsNumpy, NOT_ITS_OWN),
]


class Fresh(DraftWorker):
    """Guesses what followed the same two tokens before in the request, which it reads anew in each call."""

    contract = (1, 0)
    capabilities = DraftCapabilities(tensor_parallel=None, stateless=True)

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        return [self.guess(request) for request in batch.requests]

    def guess(self, request: DraftRequest) -> Draft | None:
        return self.continuation(request, self.pairs(request))

    def pairs(self, request: DraftRequest) -> Pairs:
        pairs = Pairs()
        pairs.take(request.token_ids.tolist())
        return pairs

    def continuation(self, request: DraftRequest, pairs: Pairs) -> Draft | None:
        tokens, guess = request.token_ids.tolist(), list[int]()
        while len(guess) < request.max_drafts:
            last, token = (tokens + guess)[-2:]
            if (last, token) not in pairs.table:
                break
            guess.append(pairs.table[last, token])
        return Draft(guess) if guess else None


class KeepsAnIndex(Fresh):
    """Takes into a request's index what came since the last call, going by the states."""

    def __init__(self, options: PluginOptions, setup: DraftSetup):
        super().__init__(options, setup)
        self.indices: dict[int, Pairs] = {}

    def pairs(self, request: DraftRequest) -> Pairs:
        index = self.indices.setdefault(request.seq_id, Pairs())
        for i in range(max(2, request.first_position), len(request.token_ids)):
            last, token, following = request.token_ids[i - 2 : i + 1].tolist()
            index.table[last, token] = following
        return index

    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self.indices.pop(seq_id, None)


class GivesUp(Fresh):
    """After three drafts of which nothing was accepted."""

    num_misses: int = 0

    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None:
        self.num_misses += not accepted

    def guess(self, request: DraftRequest) -> Draft | None:
        return super().guess(request) if self.num_misses < 3 else None


class SeesItsMisses(Fresh):
    """By itself, in the tokens that came; each shortens the drafts of its request, and hits lengthen them."""

    def __init__(self, options: PluginOptions, setup: DraftSetup):
        super().__init__(options, setup)
        self.guesses: dict[int, tuple[int, int]] = {}
        self.lengths: dict[int, int] = {}

    def guess(self, request: DraftRequest) -> Draft | None:
        length = self.lengths.get(request.seq_id, 4)
        if request.seq_id in self.guesses:
            place, token = self.guesses[request.seq_id]
            if place < len(request.token_ids):
                length += 1 if request.token_ids[place] == token else -1
        self.lengths[request.seq_id] = length = min(4, max(1, length))
        draft = super().guess(request)
        if draft is None:
            return None
        self.guesses[request.seq_id] = len(request.token_ids), draft.token_ids[0]
        return Draft(draft.token_ids[:length])


class GetsBolder(Fresh):
    """Guesses one token until two drafts were accepted."""

    num_hits: int = 0

    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None:
        self.num_hits += bool(accepted)

    def guess(self, request: DraftRequest) -> Draft | None:
        draft = super().guess(request)
        return draft if draft is None or self.num_hits >= 2 else Draft(draft.token_ids[:1])


class Notes(Fresh):
    """What was accepted, for nobody's draft."""

    def __init__(self, options: PluginOptions, setup: DraftSetup):
        super().__init__(options, setup)
        self.accepted: dict[int, int] = {}

    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None:
        self.accepted[seq_id] = self.accepted.get(seq_id, 0) + len(accepted)


class Caches(Fresh):
    """What it read of a request before: its drafts are the same without."""

    def __init__(self, options: PluginOptions, setup: DraftSetup):
        super().__init__(options, setup)
        self.cached: dict[int, Pairs] = {}

    def pairs(self, request: DraftRequest) -> Pairs:
        pairs = self.cached.setdefault(request.seq_id, Pairs())
        pairs.take(request.token_ids.tolist())
        return pairs

    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self.cached.pop(seq_id, None)


class IgnoresPredictions(Lookup):
    capabilities = DraftCapabilities(tensor_parallel=None, reads_prediction=True)


class Silent(DraftWorker):
    contract = (1, 0)
    capabilities = DraftCapabilities(tensor_parallel=None)

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        return [None] * len(batch.requests)


CALL_ALONE = "test_drafts_follow_from_the_call_alone"
DECLARED_FAULTS = [
    Fault("declares stateless and keeps an index of each request", KeepsAnIndex, CALL_ALONE),
    Fault("declares stateless and gives up after some misses", GivesUp, f"{CALL_ALONE}[wrong]"),
    Fault("declares stateless and goes by its misses in the text", SeesItsMisses, f"{CALL_ALONE}[wrong]"),
    Fault("declares stateless and guesses more after hits", GetsBolder, f"{CALL_ALONE}[right]"),
    Fault("declares predictions and reads none", IgnoresPredictions, "test_guesses_from_predictions"),
]


@pytest.mark.parametrize("plugin", [Notes, Caches])
def test_a_stateless_drafter_may_keep_what_changes_no_draft(plugin: type[DraftWorker]) -> None:
    outcome = run_test(DraftWorkerSuite, CALL_ALONE, plugin=plugin)
    assert len(outcome.passed) == 2, outcome


@pytest.mark.parametrize(
    "test",
    ["test_guesses_something", "test_keeps_to_max_drafts", "test_answers_every_request_with_a_well_formed_draft"],
)
def test_what_cannot_be_said_of_a_drafter_that_never_guesses_is_skipped(test: str) -> None:
    assert run_test(DraftWorkerSuite, test, plugin=Silent).skipped == [test]
    assert run_test(DraftWorkerSuite, test, plugin=Lookup).passed == [test]


class Continues(Lookup):
    """Texts that begin with 1, 2, 3."""

    def guess(self, request: DraftRequest) -> Draft | None:
        return super().guess(request) if request.token_ids[:3].tolist() == [1, 2, 3] else None


def test_a_subclass_may_have_texts_of_its_own() -> None:
    def text(suite: DraftWorkerSuite, period: int | None = None, seed: int = 0) -> list[int]:
        return [1, 2, 3, *(4 + seed % 3 + (i % 5) for i in range(117))]

    for test in ("test_guesses_something", "test_keeps_to_max_drafts"):
        assert run_test(DraftWorkerSuite, test, plugin=Continues).skipped == [test]
        assert run_test(DraftWorkerSuite, test, plugin=Continues, text=text).passed == [test]


class Drawn(DraftWorker):
    """Draws each token from a distribution that depends on the one before it."""

    contract = (1, 0)
    capabilities = DraftCapabilities(probabilities=True)

    def __init__(self, options: PluginOptions, setup: DraftSetup):
        super().__init__(options, setup)
        generator = torch.Generator().manual_seed(1)
        self.logits = 1.5 * torch.randn(setup.vocab_size, setup.vocab_size, generator=generator)

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        return [self.draw_chain(request) for request in batch.requests]

    def draw_chain(self, request: DraftRequest) -> Draft | None:
        if not request.max_drafts:
            return None
        tokens, reported = [int(request.token_ids[-1])], []
        for node in range(request.max_drafts):
            probs = self.setup.distributions(self.logits[tokens[-1:]], [request.sampling])
            tokens.append(self.draw(probs, self.uniform(request, node)))
            reported.append(self.report(probs))
        return Draft(tokens[1:], None, torch.cat(reported))

    def uniform(self, request: DraftRequest, node: int) -> float:
        return float(request.uniforms[node])

    def draw(self, probs: torch.Tensor, uniform: float) -> int:
        return int(self.setup.draw(probs, np.array([uniform])))

    def report(self, probs: torch.Tensor) -> torch.Tensor:
        return probs


class ReportsUniform(Drawn):
    def report(self, probs: torch.Tensor) -> torch.Tensor:
        return torch.full_like(probs, 1 / probs.shape[1])


class TakesTheBest(Drawn):
    def draw(self, probs: torch.Tensor, uniform: float) -> int:
        return int(probs.argmax())


class ReportsSquares(Drawn):
    def report(self, probs: torch.Tensor) -> torch.Tensor:
        return probs.square() / probs.square().sum()


class OneUniform(Drawn):
    def uniform(self, request: DraftRequest, node: int) -> float:
        return float(request.uniforms[0])


class OwnRandomNumbers(Drawn):
    def uniform(self, request: DraftRequest, node: int) -> float:
        return float(torch.rand(()))


class ReportsWeights(Drawn):
    def report(self, probs: torch.Tensor) -> torch.Tensor:
        return 2 * probs


class SaysThatItDraws(Lookup):
    capabilities = DraftCapabilities(tensor_parallel=None, probabilities=True)


class SaysThatItBranches(Lookup):
    capabilities = DraftCapabilities(tensor_parallel=None, trees=True)


TREES = "test_proposes_trees_where_it_declares_them"
FROM_ITS_DISTRIBUTION = "test_drafts_are_drawn_from_the_distributions_that_come_with_them"
DRAWN_FAULTS = [
    Fault("draws from q and reports the uniform distribution", ReportsUniform, FROM_ITS_DISTRIBUTION),
    Fault("takes the most likely token and reports q", TakesTheBest, FROM_ITS_DISTRIBUTION),
    Fault("draws from q and reports its square", ReportsSquares, FROM_ITS_DISTRIBUTION),
    Fault("draws all nodes with one uniform", OneUniform, FROM_ITS_DISTRIBUTION),
    Fault("declares probabilities and gives none", SaysThatItDraws, FROM_ITS_DISTRIBUTION),
    Fault("declares trees and gives chains", SaysThatItBranches, TREES),
    Fault("draws with random numbers of its own", OwnRandomNumbers, "test_repeats_itself"),
    Fault("reports what does not sum to 1", ReportsWeights, "test_answers_every_request_with_a_well_formed_draft"),
]


@pytest.mark.parametrize("fault", LOOKUP_FAULTS + DECLARED_FAULTS + DRAWN_FAULTS, ids=str)
def test_the_suite_finds_a_drafter_that(fault: Fault) -> None:
    check_fault(fault, DraftWorkerSuite, plugin=fault.plugin, num_draws=800)


@pytest.mark.parametrize(
    ("capability", "case"),
    [
        ("probabilities", FROM_ITS_DISTRIBUTION),
        ("trees", TREES),
        ("reads_prediction", "test_guesses_from_predictions"),
    ],
    ids=lambda value: value,
)
def test_what_a_drafter_never_gives_is_no_hint(capability: str, case: str) -> None:
    assert try_capability(DraftWorkerSuite, {"plugin": Lookup}, Capability(capability), [case]) is None


class TestLookup(DraftWorkerSuite):
    plugin = Lookup


class TestFresh(DraftWorkerSuite):
    plugin = Fresh


class TestDrawn(DraftWorkerSuite):
    plugin = Drawn
