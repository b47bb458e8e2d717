"""Token recycling: the target's own second choices, remembered by token, make the next draft.

Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling"
(arXiv 2408.08696), section 3. A table holds for every token the k tokens that the target last found most likely after
it. Every verified row updates it, rows of rejected draft tokens too, and a tree of what the table says follows the last
known token is the draft.

Differences from the paper: its tree has a fixed shape, found once by hand; here the tree grows at its likeliest nodes,
by how often the table's first, second, ... entry was right for this request so far. And while a request runs, what it
teaches is its own: tables meet when requests end, so that a draft depends on finished requests only.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from dovetail.contracts.draft_target import ReadsTopTokens, TopTokens
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.speculation import (
    Draft,
    DraftBatch,
    DraftCapabilities,
    DraftRequest,
    DraftSetup,
    LearnsFromRequests,
    SpeculationNeed,
    TreesByOption,
)

_NONE = -1
_FIRST_RATE, _FALL, _PRIOR_ROWS = 0.4, 0.4, 20.0
"""Before a request has shown better: the table's first entry is right 40 times in 100, each further one as often times
this. That counts as much as so many rows."""
_LEAST_RATE = 1e-4


class RecyclingOptions(PluginOptions):
    """Options of `recycling`: how much is remembered, and the shape of drafts."""

    top_k: int = Field(default=8, ge=1, le=64)
    """Tokens that are remembered to follow each token."""
    tree: bool = True
    """Whether drafts are trees; false: the likeliest chain, for backends and rules that serve chains only."""
    share: bool = True
    """Whether what finished requests taught serves later ones. Texts do not depend on it, but the speed of a text may
    then reveal the answers of others. False: each request begins with an empty table."""


@dataclass
class _Request:
    """What one request taught."""

    hits: NDArray[np.float64]
    """float64 [top_k + 1]: rows after which the target preferred the table's i-th entry; the last: none of them."""
    table: dict[int, list[int]] = field(default_factory=dict)
    """By token, what follows it, best first."""


class RecyclingDrafter(ReadsTopTokens, TreesByOption, LearnsFromRequests):
    """Needs no weights and no states. Guesses are the table's entries, not draws: no draft distributions are given."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = RecyclingOptions
    capabilities = DraftCapabilities(tensor_parallel=None, trees=True, confidence=True)
    options: RecyclingOptions

    @classmethod
    def proposes_trees(cls, options: Any) -> bool:
        """Whether the option `tree` is set."""
        assert isinstance(options, RecyclingOptions)
        return options.tree

    @classmethod
    def num_top_tokens(cls, options: Any) -> int:
        """Returns the option `top_k`."""
        assert isinstance(options, RecyclingOptions)
        return options.top_k

    @classmethod
    def check(cls, need: SpeculationNeed, options: RecyclingOptions, environment: Environment) -> list[str]:
        """Refuses to remember more tokens than there are."""
        if options.top_k > need.vocab_size:
            return [f"top_k is {options.top_k}, and the target has {need.vocab_size} tokens: lower it."]
        return []

    def __init__(self, options: RecyclingOptions, setup: DraftSetup):
        super().__init__(options, setup)
        rates = _FIRST_RATE * _FALL ** np.arange(options.top_k)
        self._prior = _PRIOR_ROWS * np.append(rates, 1 - rates.sum())
        self._requests: dict[int, _Request] = {}
        self.forget_finished()

    def forget_finished(self) -> None:
        self._shared = np.full((self.setup.vocab_size, self.options.top_k), _NONE, dtype=np.int32)
        """int32 [vocab_size, top_k]: by token, what follows it, best first; `_NONE` where no finished request knows."""

    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None:
        request = self._requests.pop(seq_id, None)
        if request is not None and request.table and self.options.share:
            self._shared[list(request.table)] = list(request.table.values())

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        drafts: list[Draft | None] = []
        for request in batch.requests:
            known = self._requests.setdefault(request.seq_id, _Request(self._prior.copy()))
            if request.top_tokens is not None:
                self._learn(known, request.top_tokens)
            drafts.append(self._draft(known, request) if request.max_drafts else None)
        return drafts

    def _learn(self, request: _Request, rows: TopTokens) -> None:
        """Steps are taken in order, so that the newest decides. A step's draft begins with its likeliest nodes, so its
        rows are taken from the last to the first: of a token that it holds twice the likeliest context decides."""
        follows, ids = rows.follows.tolist(), rows.ids.tolist()
        starts = np.flatnonzero(rows.parents < 0).tolist()
        for start, end in zip(starts, [*starts[1:], len(follows)], strict=True):
            for token, found in zip(reversed(follows[start:end]), reversed(ids[start:end]), strict=True):
                before = self._following(request, token)
                if before is not None:
                    request.hits[before.index(found[0]) if found[0] in before else -1] += 1
                request.table[token] = found

    def _following(self, request: _Request, token: int) -> list[int] | None:
        """What follows a token, best first; None where nobody knows."""
        own = request.table.get(token)
        if own is not None:
            return own
        shared: list[int] = self._shared[token].tolist()
        return None if shared[0] == _NONE else shared

    def _draft(self, known: _Request, request: DraftRequest) -> Draft | None:
        """The likeliest nodes, best first: a draft that is cut to its first nodes is the best of that size."""
        rates = np.maximum(known.hits / known.hits.sum(), _LEAST_RATE)[:-1].tolist()
        width = len(rates) if self.options.tree else 1
        token_ids: list[int] = []
        parents: list[int] = []
        confidence: list[float] = []
        order = itertools.count()
        waiting: list[tuple[float, int, int, int, float]] = []

        def offer(parent: int, token: int, prob: float) -> None:
            for rank, follower in enumerate((self._following(known, token) or [])[:width]):
                heapq.heappush(waiting, (-prob * rates[rank], next(order), parent, follower, rates[rank]))

        offer(-1, int(request.token_ids[-1]), 1.0)
        while waiting and len(token_ids) < request.max_drafts:
            negative, _, parent, token, rate = heapq.heappop(waiting)
            token_ids.append(token)
            parents.append(parent)
            confidence.append(rate)
            offer(len(token_ids) - 1, token, -negative)
        if not token_ids:
            return None
        return Draft(token_ids, parents if self.options.tree else None, confidence=confidence)
