"""Forced tokens as drafts: what the grammar of a request says will come next whatever is drawn, such as the names of a
JSON Schema's properties.

As in SGLang's "jump forward" (Zheng et al. 2023, arXiv 2312.07104), but verified like any other draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dovetail.contracts.speculation import Draft, DraftBatch, DraftCapabilities, DraftWorker


class GrammarDrafter(DraftWorker):
    """Guesses forced tokens, and nothing for requests without a grammar. Keeps no state and needs no weights."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = DraftCapabilities(tensor_parallel=None, stateless=True)
    stability = "provisional"

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        return [Draft(list(request.forced[: request.max_drafts])) for request in batch.requests]
