from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.spec_decode.medusa.tree import best_tree, chain, from_paths


def test_a_chain_takes_the_best_candidate_of_each_head():
    tree = chain(3)
    assert (tree.heads, tree.ranks, tree.parents) == ((0, 1, 2), (0, 0, 0), (-1, 0, 1))
    assert tree.is_chain


def test_paths_name_ranks_per_depth():
    tree = from_paths([(0,), (1,), (0, 2), (1, 0)])
    assert (tree.heads, tree.ranks, tree.parents) == ((0, 0, 1, 1), (0, 1, 2, 0), (-1, -1, 0, 1))
    assert (tree.num_heads, tree.num_candidates, tree.is_chain) == (2, 3, False)


@pytest.mark.parametrize(
    ("paths", "words"),
    [([(0, 0)], "no parent"), ([(0,), (0,)], "twice"), ([()], "no path"), ([(0,), (0, -1)], "no path")],
)
def test_paths_that_make_no_tree_are_refused(paths: list[tuple[int, ...]], words: str):
    with pytest.raises(ValueError, match=words):
        from_paths(paths)


@given(
    accuracies=st.lists(st.lists(st.floats(0.01, 0.5), min_size=1, max_size=3), min_size=1, max_size=3),
    count=st.integers(1, 10),
)
@settings(max_examples=150, deadline=None)
def test_no_tree_of_the_size_has_more_right_tokens(accuracies: list[list[float]], count: int):
    worth: dict[tuple[int, ...], float] = {}
    for depth in range(1, len(accuracies) + 1):
        for path in itertools.product(*(range(len(ranks)) for ranks in accuracies[:depth])):
            product = 1.0
            for head, rank in enumerate(path):
                product *= accuracies[head][rank]
            worth[path] = product
    tree = best_tree(accuracies, count)
    paths: list[tuple[int, ...]] = []
    for rank, parent in zip(tree.ranks, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    # No node is worth more than its parent, so the best nodes of all make a tree.
    best = sorted(worth.values(), reverse=True)[:count]
    assert [worth[path] for path in paths] == pytest.approx(best)
