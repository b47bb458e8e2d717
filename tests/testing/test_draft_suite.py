"""The suite of draft workers keeps the contract that it checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dovetail.contracts.speculation import Draft, DraftBatch, DraftWorker
from dovetail.testing.draft_suite import DraftWorkerSuite


class Particular(DraftWorker):
    """Guesses for one request of two, and takes nothing from its host that the contract rules out."""

    contract = (1, 0)
    shortest: ClassVar[int] = 100

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        for request in batch.requests:
            if request.max_drafts == 0:
                continue
            assert 1 <= request.num_prompt_tokens < len(request.token_ids), "it drafts behind a complete prompt"
            Particular.shortest = min(Particular.shortest, len(request.token_ids))
        return [Draft([1, 2][: r.max_drafts]) if r.seq_id % 2 else None for r in batch.requests]

    def on_verified(self, seq_id: int, accepted: Sequence[int], num_drafted: int) -> None:
        assert seq_id % 2, "a request without a draft has no verdict"
        assert 0 < num_drafted <= 2


class TestParticular(DraftWorkerSuite):
    plugin = Particular

    def test_serves_short_requests(self) -> None:
        """As the suite has it, down to a prompt of one token."""
        super().test_serves_short_requests()
        assert Particular.shortest == 2
