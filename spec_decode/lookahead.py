"""Lookahead decoding: the target itself guesses, in rows of the step in which it verifies.

Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (arXiv 2402.02057),
section 3.
A window of W columns and N - 1 levels holds guessed tokens: level j of column i is at position p + i + j, behind the
last known token at position p, which is level 0 of column 0. Each step computes all of them. What the target says after
the newest level is the next level (one Jacobi iteration), the oldest level leaves, and each column with its new token
is an N-gram for the pool. The pool's N-grams that begin with the last known token are the candidates that get verified.

The paper's window rows are no drafts: a row sees level 0 up to its column, and its own column. That is the mask of a
tree in which level 0 is a chain and each column hangs off it, so here the window is part of the draft's tree. A row of
it that happens to be right is accepted, which the paper's is not; so the output is the target's all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field

from dovetail.contracts.draft_target import ReadsTopTokens, TopTokens
from dovetail.contracts.plugin import Environment, PluginOptions
from dovetail.contracts.speculation import (
    Draft,
    DraftBatch,
    DraftCapabilities,
    DraftRequest,
    DraftSetup,
    SpeculationNeed,
)

_MAX_POOL = 4096
"""First tokens that a request's pool holds; those not asked for longest are dropped."""


class LookaheadOptions(PluginOptions):
    """Options of `lookahead`, by the paper's letters."""

    window: int = Field(default=5, ge=1)
    """W: columns of the window."""
    ngram: int = Field(default=3, ge=2)
    """N: tokens of an n-gram, so that a round accepts N - 1 of them at most, but for lucky windows."""
    candidates: int = Field(default=5, ge=1)
    """G: most n-grams of one first token that are kept, and verified at a time."""

    @property
    def num_window_nodes(self) -> int:
        """Nodes that the window takes of a draft: all cells but the last known token."""
        return self.window * (self.ngram - 1) - 1


class _Tree:
    """A draft in the making, in which each path of tokens is there once."""

    def __init__(self, limit: int):
        self._limit = limit
        self._index: dict[tuple[int, int], int] = {}
        self.token_ids: list[int] = []
        self.parents: list[int] = []

    def add(self, parent: int, token: int) -> int | None:
        """Returns the node of this token below `parent`; None where the draft is full."""
        node = self._index.get((parent, token))
        if node is None and len(self.token_ids) < self._limit:
            node = self._index[parent, token] = len(self.token_ids)
            self.token_ids.append(token)
            self.parents.append(parent)
        return node

    def add_path(self, tokens: Sequence[int]) -> None:
        """Adds as much of a path from the root down as fits."""
        node: int | None = -1
        for token in tokens:
            if node is not None:
                node = self.add(node, token)


@dataclass
class _Request:
    """The window and the pool of one request."""

    levels: list[list[int]]
    """[N - 1][W]: level 0 of column 0 is not looked at, it is the last known token."""
    num_known: int
    """Known tokens when the window was laid out, which fixes its position."""
    root: int
    """The last known token then."""
    pool: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = field(default_factory=OrderedDict)
    """By first token, the N - 1 tokens that follow it, the newest last."""


class LookaheadDrafter(ReadsTopTokens):
    """Needs no weights and no states. Guesses are not drawn: no draft distributions are given."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = LookaheadOptions
    capabilities = DraftCapabilities(tensor_parallel=None, trees=True)
    options: LookaheadOptions

    @classmethod
    def num_top_tokens(cls, options: Any) -> int:
        """Returns 1: the window goes on with the likeliest token."""
        return 1

    @classmethod
    def check(cls, need: SpeculationNeed, options: LookaheadOptions, environment: Environment) -> list[str]:
        """Refuses drafts that cannot hold the window and one n-gram."""
        least = options.num_window_nodes + options.ngram - 1
        if need.num_tokens < least:
            return [
                f"a window of {options.window} columns for n-grams of {options.ngram} tokens takes "
                f"{options.num_window_nodes} draft tokens, and each n-gram {options.ngram - 1} more: set num_tokens to "
                f"{least} or more, or a smaller window or ngram."
            ]
        return []

    def __init__(self, options: LookaheadOptions, setup: DraftSetup):
        super().__init__(options, setup)
        self._requests: dict[int, _Request] = {}

    def on_finished(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._requests.pop(seq_id, None)

    def propose(self, batch: DraftBatch) -> Sequence[Draft | None]:
        drafts: list[Draft | None] = []
        for request in batch.requests:
            if not request.max_drafts:
                drafts.append(None)
                continue
            known = self._requests.get(request.seq_id)
            if known is None:
                known = self._requests[request.seq_id] = self._begin(request)
            else:
                self._move(known, request)
            drafts.append(self._draft(known, request))
        return drafts

    def _begin(self, request: DraftRequest) -> _Request:
        """A window of tokens of the prompt: the paper begins with random ones, and the prompt's are as good."""
        width, known = self.options.window, request.token_ids
        levels = [
            [int(known[(level * width + column) % len(known)]) for column in range(width)]
            for level in range(self.options.ngram - 1)
        ]
        return _Request(levels, len(known), int(known[-1]))

    def _move(self, known: _Request, request: DraftRequest) -> None:
        """Takes in what the target said after the window's rows, and lays the window behind the last known token."""
        newest = [] if request.top_tokens is None else self._newest(known, request.top_tokens)
        moved = len(request.token_ids) - known.num_known
        levels = known.levels
        if any(token is not None for token in newest):
            for column, token in enumerate(newest):
                if token is not None and not (column == 0 and self._is_refuted(known, request)):
                    first = known.root if column == 0 else levels[0][column]
                    self._remember(known, first, (*(level[column] for level in levels[1:]), token))
            # The oldest level leaves. Where a row was not computed, its column's newest token stays a guess.
            last = [levels[-1][column] if token is None else token for column, token in enumerate(newest)]
            levels = [*levels[1:], last]
            moved -= 1
        known.levels = [_shifted(level, max(0, moved)) for level in levels]
        known.num_known, known.root = len(request.token_ids), int(request.token_ids[-1])

    def _is_refuted(self, known: _Request, request: DraftRequest) -> bool:
        """Whether the text itself, which column 0 follows, has gone on otherwise than the column says."""
        return self.options.ngram > 2 and int(request.token_ids[known.num_known]) != known.levels[1][0]

    def _newest(self, known: _Request, rows: TopTokens) -> list[int | None]:
        """By column, what the target says after the newest level of the window; None where that was not computed."""
        follows, parents = rows.follows.tolist(), rows.parents.tolist()
        root = len(parents) - 1 - parents[::-1].index(-1)
        if follows[root] != known.root:  # the window lay elsewhere
            return [None] * self.options.window
        index = {(parents[row], follows[row]): row for row in range(root + 1, len(parents))}
        trunk: int | None = root
        found: list[int | None] = []
        for column in range(self.options.window):
            if column and trunk is not None:
                trunk = index.get((trunk, known.levels[0][column]))
            row = trunk
            for level in known.levels[1:]:
                row = None if row is None else index.get((row, level[column]))
            found.append(None if row is None else int(rows.ids[row, 0]))
        return found

    def _remember(self, known: _Request, first: int, following: tuple[int, ...]) -> None:
        grams = known.pool.setdefault(first, OrderedDict())
        grams[following] = None
        grams.move_to_end(following)
        if len(grams) > self.options.candidates:
            grams.popitem(last=False)
        known.pool.move_to_end(first)
        if len(known.pool) > _MAX_POOL:
            known.pool.popitem(last=False)

    def _draft(self, known: _Request, request: DraftRequest) -> Draft | None:
        """The candidates that leave the window its nodes, then the window. One candidate is verified in any case."""
        tree = _Tree(request.max_drafts)
        budget = max(self.options.ngram - 1, request.max_drafts - self.options.num_window_nodes)
        for gram in reversed(known.pool.get(known.root, OrderedDict())):
            if len(tree.token_ids) + len(gram) <= budget:
                tree.add_path(gram)
        trunk: int | None = -1
        for column in range(self.options.window):
            if column and trunk is not None:
                trunk = tree.add(trunk, known.levels[0][column])
            node = trunk
            for level in known.levels[1:]:
                node = None if node is None else tree.add(node, level[column])
        return Draft(tree.token_ids, tree.parents) if tree.token_ids else None


def _shifted(level: Sequence[int], count: int) -> list[int]:
    """A level whose first `count` columns lie behind; what comes in at the end are those tokens, for want of better."""
    count %= len(level)
    return [*level[count:], *level[:count]]
