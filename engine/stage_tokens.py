"""What pipeline stages but the last are to be sent of tokens, which they neither sample nor draft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dovetail.contracts.scheduler import RequestStatus
from dovetail.contracts.step import DraftTokens, StepPlan, StepResult
from dovetail.engine.sequence import Sequence


class StageTokens:
    """The tokens that each request's last plan brought, or found there."""

    def __init__(self) -> None:
        self._num_sent: dict[int, int] = {}
        """By seq_id, the leading tokens that every stage has."""
        self._drafts: dict[int, DraftTokens] = {}
        """By seq_id, guesses that the last stage keeps for the request's next step."""

    def complete(self, plan: StepPlan, requests: Iterable[Sequence]) -> StepPlan:
        """The plan with what stages lack of its `requests`."""
        sampled: list[tuple[int, list[int]]] = []
        num_sent = self._num_sent
        for new in plan.new_requests:
            num_sent[new.seq_id] = len(new.token_ids)
        for sequence in requests:
            seq_id, num_tokens = sequence.seq_id, len(sequence.token_ids)
            if (sent := num_sent[seq_id]) < num_tokens:
                sampled.append((seq_id, sequence.token_ids[sent:]))
                num_sent[seq_id] = num_tokens
        drafts = self._take_drafts(plan) if self._drafts else []
        return replace(plan, sampled=sampled, draft_tokens=drafts) if sampled or drafts else plan

    def note(self, requests: list[Sequence], result: StepResult) -> None:
        """A step of these requests was committed."""
        for index, drafts in result.next_drafts.items():
            sequence = requests[index]
            if sequence.status is RequestStatus.RUNNING and sequence.num_draft_tokens:
                self._drafts[sequence.seq_id] = drafts

    def forget(self, seq_id: int) -> None:
        """The request has ended."""
        self._num_sent.pop(seq_id, None)
        self._drafts.pop(seq_id, None)

    def _take_drafts(self, plan: StepPlan) -> list[tuple[int, DraftTokens]]:
        """The drafts that the plan computes. Those of its other requests are out of date with it."""
        taken = []
        counts = plan.num_drafts if plan.num_drafts is not None else [0] * len(plan.seq_ids)
        for seq_id, count in zip(plan.seq_ids, counts, strict=True):
            drafts = self._drafts.pop(seq_id, None)
            if drafts is not None and count:
                taken.append((seq_id, _first(drafts, count)))
        return taken


def _first(drafts: DraftTokens, count: int) -> DraftTokens:
    """The first so many: a scheduler may grant fewer than there are. Parents come before children."""
    if count == len(drafts.token_ids):
        return drafts
    return DraftTokens(drafts.token_ids[:count], None if drafts.parents is None else drafts.parents[:count])
