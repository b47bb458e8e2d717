"""Conformance suite of draft lengths. A third party's test is a subclass::

    from dovetail.testing import DraftLengthSuite

    class TestMyLength(DraftLengthSuite):
        plugin = MyLength

Requests, drafts, verdicts and seconds are simulated; every random number comes from a seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from dovetail.contracts.draft_length import (
    AdaptiveDraftLength,
    DrafterCall,
    DrafterFacts,
    DraftLength,
    DraftQuestion,
    DraftRound,
    LengthSetup,
    OfferedDrafts,
    OtherDraft,
    StepReport,
)
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import Draft
from dovetail.testing.side_effects import leaves_alone
from dovetail.testing.suite import PluginSuite

VOCAB_SIZE = 20
NUM_STEPS = 60
"""Steps of a simulated run: enough for a policy to find out whether drafts pay."""
FACTS = {
    "lookup": DrafterFacts(num_tokens=6, stateless=True),
    "head": DrafterFacts(num_tokens=4, keeps_layers=True),
    "tree": DrafterFacts(num_tokens=5, trees=True),
}
OTHERS = {"other": DrafterFacts(num_tokens=3)}

Answers = list[tuple[str, int, int]]
"""("ask" or "keep", seq_id, count)."""


class DraftLengthSuite(PluginSuite):
    """Tests of every draft-length policy."""

    kind: ClassVar[str] = "draft_length"
    plugin: ClassVar[type[DraftLength]]
    options: ClassVar[Mapping[str, Any]] = {}

    def create(self) -> DraftLength:
        """Returns a new policy for three drafters, with a fourth in the engine."""
        options: PluginOptions = self.plugin.Options.model_validate(dict(self.options))
        return self.plugin(options, LengthSetup(drafters=FACTS, others=OTHERS))

    @pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
    @pytest.mark.parametrize("num_requests", [1, 6])
    def test_answers_lie_between_nothing_and_what_is_possible(self, chance: float, num_requests: int) -> None:
        """In runs where no draft is accepted, some are, and all; `Run` asserts it of every answer."""
        Run(self.create(), chance, seed=num_requests).steps(list(range(num_requests)))

    def test_asks_nothing_where_nothing_can_be_used(self) -> None:
        """It asks for no drafts of incomplete prompts and of requests that are about to end."""
        run = Run(self.create(), 0.5)
        run.steps([0, 1, 2])
        for name in FACTS:
            assert run.ask(name, [0, 1], most=[0, 0]) == [0, 0]

    @pytest.mark.parametrize("name", FACTS)
    def test_serves_drafts_of_every_kind(self, name: str) -> None:
        """Trees and chains, drawn and not, with confidences and without."""
        run = Run(self.create(), 0.5)
        run.steps([0, 1, 2])
        for seed in range(20):
            run.keep([name], [1], [some_draft(name, 4, seed)])

    def test_repeats_itself(self) -> None:
        """The same calls get the same answers from two instances, however the process goes on meanwhile."""
        answers = []
        for _ in range(2):
            run = Run(self.create(), 0.5)
            run.steps(list(range(4)))
            answers.append(run.answers)
        assert answers[0] == answers[1]

    def test_leaves_alone_what_is_not_its_own(self) -> None:
        """It does not change its arguments or the random generators of the process."""
        run = Run(self.create(), 0.5, checks_side_effects=True)
        run.steps(list(range(4)))

    def test_forgets_requests(self) -> None:
        """A seq_id whose request ended names a new one, which is served as under any other seq_id."""
        answers = []
        for seq_id in (0, 50):
            run = Run(self.create(), 0.9)
            run.steps([0, 1])
            run.forget([0, 77])
            before = len(run.answers)
            run.steps([seq_id, 1])
            answers.append([(kind, count) for kind, _, count in run.answers[before:]])
        assert answers[0] == answers[1]

    def test_takes_reports_of_requests_that_it_was_never_asked_about(self) -> None:
        """Drafts of other policies' requests are verified in the same steps."""
        length = self.create()
        if not isinstance(length, AdaptiveDraftLength):
            pytest.skip(f"{self.plugin.__name__} does not adapt: nothing is reported to it")
        rounds = [DraftRound(seq_id=9, drafter="other", drafted=3, accepted=[0, 1])]
        length.observe(
            StepReport(num_requests=1, num_drafts=0, num_other_drafts=3, seconds=None, rounds=rounds, calls=[])
        )
        length.forget([9])

    def test_names_drafters_of_its_own_as_idle(self) -> None:
        """At every batch size, before anything is known and after drafts were never accepted."""
        length = self.create()
        if not isinstance(length, AdaptiveDraftLength):
            pytest.skip(f"{self.plugin.__name__} does not adapt: it is not asked")
        assert not length.idle_drafters(1), "nothing has shown yet that a drafter does not pay"
        Run(length, 0.0).steps([0, 1])
        for num_requests in (1, 2, 100):
            assert set(length.idle_drafters(num_requests)) <= set(FACTS)

    def test_a_policy_that_does_not_adapt_answers_for_each_request_by_itself(self) -> None:
        """Where drafts are drawn, their number decides which tokens a seeded request gets: it must be the same in any
        batch, after anything."""
        if issubclass(self.plugin, AdaptiveDraftLength):
            pytest.skip(f"{self.plugin.__name__} adapts: the host has no drafts drawn for seeded requests")
        busy = Run(self.create(), 0.5)
        busy.steps(list(range(5)))
        for name in FACTS:
            for seed, most in ((0, 4), (1, 2)):
                draft = some_draft(name, most, seed)
                together = (
                    busy.ask(name, [7, 8, 9], most=[3, most, 1]),
                    busy.keep([name] * 3, [7, 8, 9], [some_draft(name, 3, 5), draft, some_draft(name, 1, 6)]),
                )
                fresh = Run(self.create(), 0.5)
                alone = fresh.ask(name, [8], most=[most]), fresh.keep([name], [8], [draft])
                assert ([together[0][1]], [together[1][1]]) == alone, f"{name}: with neighbours and alone"

    @pytest.mark.parametrize("name", FACTS)
    def test_whether_a_drawn_node_is_kept_does_not_hang_on_what_was_drawn(self, name: str) -> None:
        """Neither at the node nor behind it: leaving a token out because of what it is would bend the distribution of
        the output, whatever the acceptance rule does."""
        for seed in range(6):
            draft = some_draft(name, 4, 2 * seed, probs=True)
            for node in range(4):
                other = redrawn(draft, node, seed)
                counts = [Run(self.create(), 0.9).ready().keep([name], [0], [one])[0] for one in (draft, other)]
                assert min(counts[0], node + 1) == min(counts[1], node + 1), f"node {node} of {draft.token_ids}"


@dataclass
class Run:
    """Runs requests that decode for some steps, calls a policy as the host does, and checks every answer."""

    length: DraftLength
    chance: float
    """Probability that each draft token is accepted."""
    seed: int = 0
    checks_side_effects: bool = False

    def __post_init__(self) -> None:
        self.answers: Answers = []
        self._random = np.random.default_rng([self.seed, 7])
        self._calls: list[DrafterCall] = []
        self._waiting: dict[int, tuple[str, int]] = {}
        self._num_known: dict[int, int] = {}

    def ready(self) -> Run:
        """After some steps of one request, which is not among those that follow."""
        self.steps([99], 6)
        return self

    def steps(self, seq_ids: Sequence[int], num_steps: int = NUM_STEPS) -> None:
        """Steps of these requests; request i has the i-th drafter, in turn."""
        names = list(FACTS)
        by_drafter: dict[str, list[int]] = {}
        for index, seq_id in enumerate(seq_ids):
            by_drafter.setdefault(names[index % len(names)], []).append(seq_id)
        for step in range(num_steps):
            self._verify(len(seq_ids), is_prompt=step % 17 == 0)
            drafts: dict[int, tuple[str, Draft]] = {}
            for name, own in by_drafter.items():
                most = [0 if step % 11 == 0 else int(self._random.integers(0, FACTS[name].num_tokens + 1)) for _ in own]
                asked = self.ask(name, own, most, len(seq_ids))
                given = []
                for seq_id, count in zip(own, asked, strict=True):
                    size = int(self._random.integers(0, count + 1))
                    if size:
                        drafts[seq_id] = (name, some_draft(name, size, int(self._random.integers(1000))))
                    given.append(size)
                seconds = 0.0001 * (1 + max(asked))
                self._calls.append(DrafterCall(drafter=name, seq_ids=own, asked=asked, given=given, seconds=seconds))
            if drafts:
                mine = list(drafts)
                counts = self.keep(
                    [drafts[seq_id][0] for seq_id in mine], mine, [drafts[seq_id][1] for seq_id in mine], len(seq_ids)
                )
                self._waiting = {seq_id: (drafts[seq_id][0], n) for seq_id, n in zip(mine, counts, strict=True) if n}

    def ask(self, name: str, seq_ids: Sequence[int], most: Sequence[int], num_requests: int | None = None) -> list[int]:
        """Asks one question and checks the answer."""
        known = {}
        for seq_id in seq_ids:
            tokens = np.ones(self._num_known.setdefault(seq_id, 12), dtype=np.int32)
            tokens.flags.writeable = False
            known[seq_id] = tokens
        question = DraftQuestion(
            drafter=name,
            seq_ids=list(seq_ids),
            most=np.array(most, dtype=np.int64),
            known_tokens=known.__getitem__,
            num_requests=num_requests or len(seq_ids),
        )
        with leaves_alone(*(question, known) if self.checks_side_effects else ()):
            answer = self.length.ask(question)
        return self._checked("ask", seq_ids, answer, most)

    def keep(
        self, names: Sequence[str], seq_ids: Sequence[int], drafts: Sequence[Draft], num_requests: int | None = None
    ) -> list[int]:
        """Makes one offer and checks the answer."""
        offered = OfferedDrafts(
            seq_ids=list(seq_ids),
            drafters=list(names),
            drafts=list(drafts),
            num_known=[self._num_known.setdefault(seq_id, 12) for seq_id in seq_ids],
            num_requests=num_requests or len(seq_ids),
            others=[OtherDraft(seq_id=1000, drafter="other", num_drafts=2)],
        )
        with leaves_alone(offered if self.checks_side_effects else ()):
            answer = self.length.keep(offered)
        return self._checked("keep", seq_ids, answer, [len(draft.token_ids) for draft in drafts])

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Ends these requests."""
        for seq_id in seq_ids:
            self._num_known.pop(seq_id, None)
            self._waiting.pop(seq_id, None)
        if isinstance(self.length, AdaptiveDraftLength):
            self.length.forget(seq_ids)

    def _checked(self, kind: str, seq_ids: Sequence[int], answer: Any, most: Sequence[int]) -> list[int]:
        found = np.asarray(answer)
        assert found.shape == (len(seq_ids),), f"{kind}: {len(seq_ids)} requests, an answer of shape {found.shape}"
        assert np.issubdtype(found.dtype, np.integer), f"{kind}: counts are integers, not {found.dtype}"
        counts: list[int] = found.tolist()
        for seq_id, count, limit in zip(seq_ids, counts, most, strict=True):
            assert 0 <= count <= limit, f"{kind}: {count} drafts of request {seq_id}, of {limit} that are possible"
            self.answers.append((kind, seq_id, count))
        return counts

    def _verify(self, num_requests: int, *, is_prompt: bool) -> None:
        """The step that computes the drafts that wait, and two of another policy."""
        rounds = []
        for seq_id, (name, count) in self._waiting.items():
            right = next((i for i in range(count) if self._random.random() >= self.chance), count)
            accepted = [0] if FACTS[name].trees and right else list(range(right))
            rounds.append(DraftRound(seq_id=seq_id, drafter=name, drafted=count, accepted=accepted))
            self._num_known[seq_id] += len(accepted)
        self._num_known = {seq_id: count + 1 for seq_id, count in self._num_known.items()}
        num_drafts = sum(count for _, count in self._waiting.values())
        report = StepReport(
            num_requests=num_requests,
            num_drafts=num_drafts,
            num_other_drafts=2,
            seconds=None if is_prompt else 0.01 + 0.0002 * num_drafts,
            rounds=[*rounds, DraftRound(seq_id=1000, drafter="other", drafted=2, accepted=[0])],
            calls=self._calls,
        )
        self._calls, self._waiting = [], {}
        if isinstance(self.length, AdaptiveDraftLength):
            with leaves_alone(report if self.checks_side_effects else ()):
                self.length.observe(report)


def some_draft(name: str, size: int, seed: int, *, probs: bool | None = None) -> Draft:
    """A draft as the drafter of that name may give it. By the seed: with probabilities, confidences, both or none."""
    random = np.random.default_rng([seed, size])
    token_ids: list[int] = random.integers(0, VOCAB_SIZE, size).tolist()
    parents = [int(random.integers(-1, node)) for node in range(size)] if FACTS[name].trees else None
    wants_probs = bool(seed & 1) if probs is None else probs
    weights = torch.from_numpy(random.random((size, VOCAB_SIZE)).astype(np.float32)) ** 8 + 1e-6
    confidence: list[float] = random.random(size).tolist()
    return Draft(
        token_ids,
        parents,
        weights / weights.sum(-1, keepdim=True) if wants_probs else None,
        confidence if seed & 2 else None,
    )


def redrawn(draft: Draft, node: int, seed: int) -> Draft:
    """The same distributions, other tokens from `node` on, and what the drafter then says of them."""
    random = np.random.default_rng([seed, node, 1])
    token_ids = [*draft.token_ids[:node], *random.integers(0, VOCAB_SIZE, len(draft.token_ids) - node).tolist()]
    if draft.confidence is None:
        return replace(draft, token_ids=token_ids)
    confidence = [*draft.confidence[:node], *random.random(len(token_ids) - node).tolist()]
    return replace(draft, token_ids=token_ids, confidence=confidence)
