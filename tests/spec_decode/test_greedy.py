from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.speculation import Draft
from dovetail.spec_decode.greedy import GreedyRule
from dovetail.testing.acceptance_suite import AcceptanceRuleSuite, greedy, verify_request


class TestGreedyRule(AcceptanceRuleSuite):
    plugin = GreedyRule


@st.composite
def distinct_trees(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Parents and tokens of a tree in which no node has two children of one token, as drafters build them."""
    parents: list[int] = []
    tokens: list[int] = []
    for node in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(-1, node - 1))
        taken = {tokens[i] for i in range(node) if parents[i] == parent}
        free = [token for token in range(3) if token not in taken]
        if free:
            parents.append(parent)
            tokens.append(draw(st.sampled_from(free)))
        else:
            break
    return parents, tokens


@given(tree=distinct_trees(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_longest_right_path_of_a_tree_stands(tree: tuple[list[int], list[int]], seed: int) -> None:
    parents, tokens = tree
    random = np.random.default_rng(seed)
    best = random.integers(0, 3, len(tokens) + 1)
    target = torch.eye(3)[best]
    request = verify_request(Draft(tokens, parents), target, random, greedy())
    verdict = GreedyRule(PluginOptions()).verify([request])[0]

    # Brute force: of all paths from the root, the longest on which every token is the best one after its parent.
    def path_to(node: int) -> list[int]:
        return [] if node < 0 else [*path_to(parents[node]), node]

    right = [
        path
        for path in map(path_to, range(-1, len(tokens)))
        if all(tokens[node] == best[parents[node] + 1] for node in path)
    ]
    longest = max(right, key=len)
    assert list(verdict.accepted) == longest
    assert verdict.next_token_id == best[longest[-1] + 1 if longest else 0]
