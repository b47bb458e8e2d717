"""`corpus_first`: the corpus in front of another drafter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from pydantic import Field

from dovetail.contracts.draft_stages import ComposesDrafters
from dovetail.contracts.speculation import Draft, DraftBatch, DraftSetup
from dovetail_corpus_ngram.drafter import CorpusNgram, CorpusOptions


class CorpusFirstOptions(CorpusOptions):
    """Options of `corpus_first`: those of `corpus_ngram`, and who is asked where the corpus does not know."""

    then: str
    """Label of another drafter of the config."""
    min_expected: float = Field(default=0.5, ge=0)
    """A guess is used if this many of its tokens are expected to be accepted, by its own confidence. Otherwise `then`
    is asked."""


class CorpusFirst(CorpusNgram, ComposesDrafters):
    """Asks another drafter, say a trained head, about requests of whose text the corpus knows too little. Who answers
    follows from the known tokens alone, so drafts that the other one draws keep the target's distribution."""

    Options = CorpusFirstOptions
    options: CorpusFirstOptions

    @classmethod
    def stages(cls, options: CorpusFirstOptions) -> Sequence[str]:
        """The one that `then` names."""
        return (options.then,)

    def __init__(self, options: CorpusFirstOptions, setup: DraftSetup):
        super().__init__(options, setup)
        (self._then,) = setup.stages.values()
        self._by_then: set[int] = set()
        """seq_ids of the requests whose last draft was not the corpus's."""

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        drafts: list[Draft | None] = []
        wanted: list[int] = []
        for request, guess in zip(batch.requests, super().propose(batch), strict=True):
            is_used = guess is not None and _expected(guess) >= self.options.min_expected
            drafts.append(guess if is_used else None)
            wanted.append(0 if is_used else request.max_drafts)
        self._by_then.difference_update(request.seq_id for request in batch.requests)
        if not any(wanted):
            return drafts
        for index, draft in enumerate(self._then.propose(wanted)):
            if wanted[index] and draft is not None:
                drafts[index] = draft
                self._by_then.add(batch.requests[index].seq_id)
        return drafts

    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None:
        """Hands the verdict on a draft of the other drafter to it; the corpus learns nothing."""
        if seq_id in self._by_then:
            self._then.on_verified(seq_id, accepted, num_drafted)

    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._by_then.discard(seq_id)


def _expected(guess: Draft) -> float:
    """Number of tokens that are accepted on average, if the confidences are true."""
    return sum(accumulate(guess.confidence or (), mul))
