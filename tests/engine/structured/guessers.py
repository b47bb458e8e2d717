"""Drafters for tests: they guess digits and other bytes without looking, as a tree or drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from dovetail.contracts.speculation import Draft, DraftBatch, DraftCapabilities, DraftWorker


class Tree(DraftWorker):
    """Two guesses behind each other for each of two first ones; most are forbidden by any small grammar."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = DraftCapabilities(trees=True, stateless=True, tensor_parallel=None)

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        drafts = []
        for request in batch.requests:
            random = np.random.default_rng(len(request.token_ids))
            tokens = [int(token) for token in random.choice([*b'0123456789-{}":ab,x', 200], 6, replace=False)]
            drafts.append(Draft(tokens, [-1, -1, 0, 0, 1, 2]))
        return drafts
