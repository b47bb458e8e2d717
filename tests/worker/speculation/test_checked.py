"""Which answers of drafters and rules are taken, and what is said of the others."""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.contracts.speculation import Draft, Verdict
from dovetail.worker.speculation.checked import checked_draft, checked_verdict

VOCAB = 6
CPU = torch.device("cpu")
EVEN = torch.ones(2, VOCAB) / VOCAB
NAN = float("nan")


@pytest.mark.parametrize(
    "token_ids",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        deque([1, 2]),
        np.array([1, 2], dtype=np.uint8),
        [np.int64(1), np.int32(2)],
        torch.tensor([1, 2]),
    ],
    ids=["list", "tuple", "range", "deque", "array", "numpy ints", "tensor"],
)
def test_every_sequence_of_ints_becomes_a_list(token_ids: Any) -> None:
    parents: Any = np.array([-1, -1])
    confidence: Any = np.array([0.5, 1], dtype=np.float32)
    draft = checked_draft(Draft(token_ids, parents, EVEN, confidence), VOCAB, CPU, trees=True)
    assert (draft.token_ids, draft.parents, draft.confidence) == ([1, 2], [-1, -1], [0.5, 1.0])
    assert {type(number) for number in (*draft.token_ids, *draft.parent_indices)} == {int}


def test_later_changes_of_a_drafters_lists_change_nothing() -> None:
    tokens, parents, confidence = [1, 2], [-1, 0], [1.0, 1.0]
    draft = checked_draft(Draft(tokens, parents, None, confidence), VOCAB, CPU, trees=True)
    for part in (tokens, parents, confidence):
        part.clear()
    assert (draft.token_ids, draft.parents, draft.confidence) == ([1, 2], [-1, 0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([1, 2], "it is a list, not a Draft"),
        (Draft({1, 2}), "token_ids: a set is no sequence"),  # type: ignore[arg-type]
        (Draft({1: 1}), "token_ids: a dict is no sequence"),  # type: ignore[arg-type]
        (Draft(iter([1, 2])), "token_ids: a list_iterator is no sequence"),  # type: ignore[arg-type]
        (Draft("12"), "token_ids: a str is no sequence"),  # type: ignore[arg-type]
        (Draft(None), "token_ids: a NoneType is no sequence"),  # type: ignore[arg-type]
        (Draft(np.array(1)), "token_ids: a int is no sequence"),  # type: ignore[arg-type]
        (Draft(np.array([[1], [2]])), "token_ids: a list is no int"),  # type: ignore[arg-type]
        (Draft([1.0]), "token_ids: a float is no int"),  # type: ignore[list-item]
        (Draft([None]), "token_ids: a NoneType is no int"),  # type: ignore[list-item]
        (Draft([True, 1]), "token_ids: a bool is no int"),
        (Draft([-1]), "token id -1 lies outside"),
        (Draft([VOCAB]), "token id 6 lies outside"),
        (Draft([1, 1], [-1]), "1 parents for 2 nodes"),
        (Draft([1, 1], [-1, 1]), "the parent of node 1 is 1"),
        (Draft([1, 1], [-2, 0]), "the parent of node 0 is -2"),
        (Draft([1], ["-1"]), "parents: a str is no int"),  # type: ignore[list-item]
        (Draft([1, 1], confidence=[0.5]), "1 confidences for 2 nodes"),
        (Draft([1], confidence=[1.5]), "a confidence lies outside"),
        (Draft([1], confidence=[NAN]), "a confidence lies outside"),
        (Draft([1], confidence=[None]), "confidence: a NoneType is no number"),  # type: ignore[list-item]
        (Draft([1, 1], None, EVEN.numpy()), "probs: a ndarray is no torch.Tensor"),  # type: ignore[arg-type]
        (Draft([1], None, EVEN), "probs have shape (2, 6), expected (1, 6)"),
        (Draft([1, 1], None, EVEN.double()), "probs are torch.float64"),
        (Draft([1, 1], None, EVEN.to_sparse()), "torch.sparse_coo, expected"),
        (Draft([1, 1], None, EVEN.to("meta")), "probs lie on meta, expected cpu"),
        (Draft([1, 1], None, EVEN * NAN), "probs are no distributions"),
        (Draft([1, 1], None, EVEN * 2), "probs are no distributions"),
        (Draft([1, 1], None, 1 - 5 * torch.eye(VOCAB)[:2] + EVEN * 0), "probs are no distributions"),
        (Draft([1, 1], None, torch.eye(VOCAB)[[1, 2]]), "the probability of its token is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "draft",
)
def test_what_is_wrong_with_a_draft_is_said(answer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        checked_draft(answer, VOCAB, CPU, trees=True)


def test_trees_are_refused_of_drafters_that_declare_none() -> None:
    with pytest.raises(ValueError, match="does not declare `trees`"):
        checked_draft(Draft([1, 2], [-1, -1]), VOCAB, CPU, trees=False)
    assert not checked_draft(Draft([1, 2], [-1, 0]), VOCAB, CPU, trees=False).is_tree


def test_an_empty_draft_may_bring_empty_distributions() -> None:
    assert checked_draft(Draft([], [], EVEN[:0], []), VOCAB, CPU, trees=False).token_ids == []


def test_parents_and_depths() -> None:
    chain, tree = Draft([3, 4, 5]), Draft([1, 2, 3, 4], [-1, -1, 0, 2])
    assert (chain.parent_indices, chain.depths) == ([-1, 0, 1], [1, 2, 3])
    assert (tree.parent_indices, tree.depths) == ([-1, -1, 0, 2], [1, 1, 2, 3])
    assert (Draft([]).parent_indices, Draft([]).depths) == ([], [])


def test_verdicts_become_lists() -> None:
    tree = Draft([1, 2, 3], [-1, 0, 0])
    accepted: Any = np.array([0, 2])
    assert checked_verdict(Verdict(accepted, np.int64(1)), tree, VOCAB) == Verdict([0, 2], 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="accepted: a list_iterator is no sequence"):
        checked_verdict(Verdict(iter([0, 2]), 1), tree, VOCAB)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="next_token_id: a NoneType is no int"):
        checked_verdict(Verdict([0], None), tree, VOCAB)  # type: ignore[arg-type]
