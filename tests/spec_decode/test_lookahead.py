from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.draft_target import TopTokens
from dovetail.contracts.plugin import Environment
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import Draft, DraftBatch, DraftRequest
from dovetail.spec_decode.lookahead import LookaheadDrafter, LookaheadOptions
from dovetail.testing.draft_suite import DraftWorkerSuite


class TestLookahead(DraftWorkerSuite):
    plugin = LookaheadDrafter
    options: ClassVar[Mapping[str, Any]] = {"window": 3, "ngram": 3, "candidates": 3}
    num_tokens = 9


class TestPairs(DraftWorkerSuite):
    """The least n-gram: the window is one level, a chain."""

    plugin = LookaheadDrafter
    options: ClassVar[Mapping[str, Any]] = {"window": 3, "ngram": 2}
    num_tokens = 6


class Target:
    """Says what follows each token, and verifies drafts as the host does: greedily, row by row."""

    def __init__(self, after: list[int], options: LookaheadOptions, num_tokens: int):
        self._after, self._count = after, num_tokens
        self._worker = LookaheadDrafter(options, TestLookahead().setup())
        self.cut = num_tokens

    def generate(self, prompt: list[int], steps: int) -> tuple[list[int], list[int]]:
        """The tokens, and how many of them each step brought."""
        known, taken = list(prompt), []
        draft: Draft = Draft([])
        for _ in range(steps):
            count = min(len(draft.token_ids), self.cut)
            follows = np.array([known[-1], *draft.token_ids[:count]], np.int32)
            parents = np.array([-1, *(parent + 1 for parent in draft.parent_indices[:count])], np.int32)
            ids = np.array([[self._after[token]] for token in follows], np.int32)
            node, before = -1, len(known)
            while node is not None:
                known.append(self._after[known[-1]])
                children = (child for child in range(count) if draft.parent_indices[child] == node)
                node = next((child for child in children if draft.token_ids[child] == known[-1]), None)
            taken.append(len(known) - before)
            draft = self._ask(known, len(prompt), TopTokens(follows, parents, ids)) or Draft([])
        return known, taken

    def _ask(self, known: list[int], num_prompt: int, rows: TopTokens) -> Draft | None:
        tokens, count = np.array(known, np.int32), self._count
        request = DraftRequest(
            0, tokens, num_prompt, count, SamplingParams(), np.array([0]), np.zeros(count), top_tokens=rows
        )
        return self._worker.propose(DraftBatch([request], None))[0]


@settings(deadline=None, max_examples=40)
@given(
    st.permutations(range(20)),
    st.lists(st.integers(0, 19), min_size=1, max_size=6),
    st.integers(2, 5),
    st.integers(2, 4),
    st.integers(0, 4),
)
def test_a_target_that_looks_one_token_back_is_guessed_whole(
    ring: list[int], prompt: list[int], window: int, ngram: int, spare: int
) -> None:
    """Where a token depends on the one before it alone, each row of the window is right whatever led to it. So the pool
    never lies, and once the window has gone round, every step accepts an n-gram: ngram - 1 tokens and the bonus
    token."""
    after = [ring[(ring.index(token) + 1) % 20] for token in range(20)]
    options = LookaheadOptions(window=window, ngram=ngram)
    num_tokens = options.num_window_nodes + (1 + spare) * (ngram - 1)
    target = Target(after, options, num_tokens)
    known, taken = target.generate(prompt, 60)
    for before, token in zip(known[len(prompt) - 1 :], known[len(prompt) :], strict=False):
        assert token == after[before]
    assert max(taken) <= num_tokens + 1
    assert min(taken[-10:]) >= ngram


def test_rows_that_were_not_computed_are_no_guesses() -> None:
    """Drafts are cut so that no column of the window is complete: the pool stays empty, and nothing breaks."""
    target = Target([(token + 1) % 20 for token in range(20)], LookaheadOptions(window=4, ngram=4), 14)
    target.cut = 1
    known, _ = target.generate([3], 30)
    assert known == [(3 + index) % 20 for index in range(len(known))]


def test_drafts_that_cannot_hold_the_window_are_refused() -> None:
    options = LookaheadOptions(window=5, ngram=4)
    (reason,) = LookaheadDrafter.check(TestLookahead().need(), options, Environment("cpu", 1, 2**30))
    assert "set num_tokens to 17" in reason
