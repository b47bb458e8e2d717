from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.draft_target import TopTokens
from dovetail.contracts.plugin import Environment
from dovetail.contracts.sampling import SamplingParams
from dovetail.contracts.speculation import Draft, DraftBatch, DraftRequest
from dovetail.spec_decode.recycling import RecyclingDrafter, RecyclingOptions
from dovetail.testing.draft_suite import DraftWorkerSuite

VOCAB, WIDTH = 50, 3


class TestTrees(DraftWorkerSuite):
    plugin = RecyclingDrafter
    num_tokens = 12


class TestChains(DraftWorkerSuite):
    plugin = RecyclingDrafter
    options: ClassVar[Mapping[str, Any]] = {"tree": False, "share": False}


def create(**options: Any) -> RecyclingDrafter:
    return RecyclingDrafter(RecyclingOptions(top_k=WIDTH, **options), TestTrees().setup())


def rows_of(*steps: list[tuple[int, list[int]]]) -> TopTokens:
    """Steps that verified a chain each."""
    follows, ids = zip(*(row for step in steps for row in step), strict=True)
    ends = np.cumsum([0, *map(len, steps)])[:-1]
    parents = np.arange(-1, len(follows) - 1)
    parents[ends] = -1
    return TopTokens(np.array(follows, np.int32), parents.astype(np.int32), np.array(ids, np.int32))


def ask(worker: RecyclingDrafter, last: int, count: int, rows: TopTokens | None = None, seq_id: int = 0) -> Draft:
    known = np.array([last], dtype=np.int32)
    request = DraftRequest(seq_id, known, 1, count, SamplingParams(), np.array([0]), np.zeros(count), top_tokens=rows)
    return worker.propose(DraftBatch([request], None))[0] or Draft([])


def teach(worker: RecyclingDrafter, rows: list[tuple[int, list[int]]], seq_id: int = 0) -> None:
    if rows:
        ask(worker, 0, 0, rows_of(rows), seq_id)


followers = st.lists(st.integers(0, VOCAB - 1), min_size=WIDTH, max_size=WIDTH, unique=True)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), followers), max_size=30), st.integers(0, 9), st.integers(1, 20))
def test_a_tree_holds_the_likeliest_paths_through_the_table(
    rows: list[tuple[int, list[int]]], last: int, count: int
) -> None:
    """No path outside the draft is likelier than one in it, by the confidence that the draft itself gives."""
    worker = create()
    teach(worker, rows)
    draft = ask(worker, last, count)
    # Of one step's rows for a token the first counts: drafts begin with their likeliest nodes.
    table = dict(reversed(rows))
    assert len(draft.token_ids) <= count
    assert bool(draft.token_ids) == (last in table)
    scores = {-1: 1.0}
    children: dict[int, list[int]] = {-1: []}
    for node, (token, parent) in enumerate(zip(draft.token_ids, draft.parent_indices, strict=True)):
        before = last if parent < 0 else draft.token_ids[parent]
        # Children come in the order of the table's entries, none twice.
        children[parent].append(token)
        children[node] = []
        assert children[parent] == table[before][: len(children[parent])]
        assert draft.confidence is not None
        scores[node] = scores[parent] * draft.confidence[node]
    made = [scores[node] for node in range(len(draft.token_ids))]
    assert made == sorted(made, reverse=True)
    if len(made) < count:  # everything that the table leads to is there
        assert all(len(children[node]) == len(table.get(token, [])) for node, token in enumerate(draft.token_ids))


def test_the_newest_of_several_steps_decides() -> None:
    """Several come at once after steps for which no draft was wanted."""
    worker = create(tree=False)
    ask(worker, 0, 0, rows_of([(1, [2, 3, 4])], [(1, [5, 6, 7]), (5, [8, 9, 10])], [(5, [11, 12, 13])]))
    assert ask(worker, 1, 2).token_ids == [5, 11]


def test_a_chain_is_the_first_entry_each_time() -> None:
    worker = create(tree=False)
    teach(worker, [(1, [2, 3, 4]), (2, [5, 6, 7]), (5, [1, 8, 9])])
    assert ask(worker, 1, 4).token_ids == [2, 5, 1, 2]


def test_entries_that_were_right_more_often_come_first() -> None:
    """The target keeps preferring what the table held in third place."""
    worker = create()
    order = [10, 11, 12]
    for _ in range(60):
        order = [order[2], order[0], order[1]]
        teach(worker, [(1, order)])
    assert ask(worker, 1, 2).token_ids == [order[2], order[0]]


@pytest.mark.parametrize("share", [True, False])
def test_finished_requests_teach_others_only_where_they_may(share: bool) -> None:
    worker = create(share=share)
    teach(worker, [(1, [2, 3, 4])], seq_id=7)
    # Those that run do not meet.
    assert not ask(worker, 1, 1, seq_id=8).token_ids
    worker.on_finished(7, [0, 1])
    assert bool(ask(worker, 1, 1, seq_id=9).token_ids) == share


def test_remembering_more_tokens_than_there_are_is_refused() -> None:
    need = TestTrees().need()
    (reason,) = RecyclingDrafter.check(need, RecyclingOptions(top_k=51), Environment("cpu", 1, 2**30))
    assert "has 50 tokens" in reason
