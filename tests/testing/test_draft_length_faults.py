"""What the suite of draft lengths finds: each a change in a policy that passes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pytest

from dovetail.contracts.draft_length import (
    AdaptiveDraftLength,
    DraftLength,
    DraftQuestion,
    LengthSetup,
    OfferedDrafts,
    StepReport,
)
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import Draft
from dovetail.testing.draft_length_suite import DraftLengthSuite
from dovetail.testing.faults import Fault, check_fault


class Half(DraftLength):
    """Asks for what can be used, and keeps the first half of what comes."""

    contract = (1, 0)

    def ask(self, question: DraftQuestion) -> Sequence[int] | np.ndarray:
        return [int(most) for most in question.most]

    def keep(self, offered: OfferedDrafts) -> Sequence[int]:
        return [self.part(draft) for draft in offered.drafts]

    def part(self, draft: Draft) -> int:
        return (len(draft.token_ids) + 1) // 2


class AsksForOneMore(Half):
    def ask(self, question: DraftQuestion) -> Sequence[int]:
        return [int(most) + 1 for most in question.most]


class AsksAlways(Half):
    def ask(self, question: DraftQuestion) -> Sequence[int]:
        return [max(1, int(most)) for most in question.most]


class AnswersForTheFirstAlone(Half):
    def ask(self, question: DraftQuestion) -> Sequence[int]:
        return [int(question.most[0])]


class AsksForFractions(Half):
    def ask(self, question: DraftQuestion) -> np.ndarray:
        return question.most / 2


class KeepsMoreThanCame(Half):
    def part(self, draft: Draft) -> int:
        return 4


class CutsWhereADrawIsUnlikely(Half):
    def part(self, draft: Draft) -> int:
        if draft.probs is None:
            return len(draft.token_ids)
        own = draft.probs[range(len(draft.token_ids)), list(draft.token_ids)].tolist()
        return next((i for i, chance in enumerate(own) if chance < 0.05), len(own))


class SharesAmongRequests(Half):
    def ask(self, question: DraftQuestion) -> Sequence[int]:
        return [int(most) // len(question.seq_ids) for most in question.most]


class TiresOfRequests(Half):
    rounds = 0

    def part(self, draft: Draft) -> int:
        self.rounds += 1
        return super().part(draft) if self.rounds < 10 else 0


class RollsDice(Half):
    def part(self, draft: Draft) -> int:
        return int(np.random.default_rng().integers(0, len(draft.token_ids) + 1))


class DrawsGlobally(Half):
    def part(self, draft: Draft) -> int:
        return int(np.random.randint(0, len(draft.token_ids) + 1))


class WritesToTheQuestion(Half):
    def ask(self, question: DraftQuestion) -> np.ndarray:
        question.most[:] //= 2
        return question.most


class Learner(AdaptiveDraftLength):
    """Asks each request for one more than it last got accepted."""

    contract = (1, 0)

    def __init__(self, options: PluginOptions, setup: LengthSetup):
        super().__init__(options, setup)
        self.accepted: dict[int, int] = {}
        self.failures: dict[str, int] = {}

    def observe(self, report: StepReport) -> None:
        for one in report.rounds:
            self.accepted[one.seq_id] = len(one.accepted)
            self.failures[one.drafter] = 0 if one.accepted else self.failures.get(one.drafter, 0) + 1

    def ask(self, question: DraftQuestion) -> Sequence[int]:
        wanted = [self.accepted.get(seq_id, 0) + 1 for seq_id in question.seq_ids]
        return [min(count, int(most)) for count, most in zip(wanted, question.most, strict=True)]

    def keep(self, offered: OfferedDrafts) -> Sequence[int]:
        return [len(draft.token_ids) for draft in offered.drafts]

    def idle_drafters(self, num_requests: int) -> Collection[str]:
        return [name for name in self.setup.drafters if self.failures.get(name, 0) > 5]

    def forget(self, seq_ids: Collection[int]) -> None:
        for seq_id in seq_ids:
            self.accepted.pop(seq_id, None)


class ForgetsNobody(Learner):
    def forget(self, seq_ids: Collection[int]) -> None:
        return None


class KnowsItsOwnRequestsOnly(Learner):
    def ask(self, question: DraftQuestion) -> Sequence[int]:
        for seq_id in question.seq_ids:
            self.accepted.setdefault(seq_id, 0)
        return super().ask(question)

    def forget(self, seq_ids: Collection[int]) -> None:
        for seq_id in seq_ids:
            del self.accepted[seq_id]


class JudgesOtherDrafters(Learner):
    def idle_drafters(self, num_requests: int) -> Collection[str]:
        return [name for name, count in self.failures.items() if count > 5 or name == "other"]


class StartsIdle(Learner):
    def idle_drafters(self, num_requests: int) -> Collection[str]:
        return list(self.setup.drafters)


POSSIBLE = "test_answers_lie_between_nothing_and_what_is_possible"
BY_ITSELF = "test_a_policy_that_does_not_adapt_answers_for_each_request_by_itself"
IDLE = "test_names_drafters_of_its_own_as_idle"
FAULTS = [
    Fault("asks for one more than can be used", AsksForOneMore, POSSIBLE),
    Fault("asks for drafts of incomplete prompts", AsksAlways, "test_asks_nothing_where_nothing_can_be_used"),
    Fault("answers for one request of many", AnswersForTheFirstAlone, POSSIBLE),
    Fault("answers fractions", AsksForFractions, POSSIBLE),
    Fault("keeps more than came", KeepsMoreThanCame, POSSIBLE),
    Fault(
        "cuts a draft where it drew an unlikely token",
        CutsWhereADrawIsUnlikely,
        "test_whether_a_drawn_node_is_kept_does_not_hang_on_what_was_drawn",
    ),
    Fault("asks for less the more requests there are, and does not say that it adapts", SharesAmongRequests, BY_ITSELF),
    Fault("keeps nothing after some rounds, and does not say that it adapts", TiresOfRequests, BY_ITSELF),
    Fault("draws random numbers of its own", RollsDice, "test_repeats_itself"),
    Fault("draws from numpy's generator", DrawsGlobally, "test_leaves_alone_what_is_not_its_own"),
    Fault("writes to the question", WritesToTheQuestion, "test_leaves_alone_what_is_not_its_own"),
    Fault("keeps what it learned of requests that ended", ForgetsNobody, "test_forgets_requests"),
    Fault("raises for seq_ids that it has not heard of", KnowsItsOwnRequestsOnly, "test_forgets_requests"),
    Fault("calls others' drafters idle", JudgesOtherDrafters, IDLE),
    Fault("calls drafters idle before they had a chance", StartsIdle, IDLE),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_draft_length_that(fault: Fault) -> None:
    check_fault(fault, DraftLengthSuite, plugin=fault.plugin)


class TestHalf(DraftLengthSuite):
    plugin = Half


class TestLearner(DraftLengthSuite):
    plugin = Learner
