"""Trees of draft tokens that grow at the most likely nodes (EAGLE-2, Li et al. 2024, arXiv 2406.16858, section 4)."""

from __future__ import annotations

import math

import numpy as np

from dovetail.contracts.speculation import Draft


class GrowingTree:
    """The tree of one request in one round. A node's score is the sum of log probabilities on the way to it."""

    def __init__(self, max_inner: int):
        self._max_inner = max_inner
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self.inner: list[int] = []
        """Nodes that were chosen to have children, parents before children: the head runs on these."""
        self._newest: range = range(0)

    def add_children(self, parent: int, tokens: list[int], log_probs: list[float]) -> None:
        """Adds children of a node, -1 for those of the last known token: `log_probs` is log p of each after it."""
        score = self._score_of(parent)
        depth = self.depths[parent] + 1 if parent >= 0 else 1
        self.tokens += tokens
        self.depths += [depth] * len(tokens)
        self._parents += [parent] * len(tokens)
        # Rounding must not lift a child above its parent.
        self._scores += [score + min(0.0, log_prob) for log_prob in log_probs]

    def choose_inner(self, count: int) -> list[int]:
        """Makes the best `count` of the nodes that were added since the last call inner, within the tree's limit."""
        self._newest = range(self._newest.stop, len(self.tokens))
        best = sorted(self._newest, key=lambda node: -self._scores[node])[:count]
        chosen = sorted(best[: max(0, self._max_inner - len(self.inner))])
        self.inner += chosen
        return chosen

    def inner_parents(self) -> list[int]:
        """Returns the index of each inner node's parent among the inner nodes; -1: a child of the last known token."""
        indices = {node: index for index, node in enumerate(self.inner)}
        return [indices[self._parents[node]] if self._parents[node] >= 0 else -1 for node in self.inner]

    def mask(self) -> np.ndarray:
        """bool [inner, inner]: which inner nodes each sees: itself and its ancestors."""
        seen = np.eye(len(self.inner), dtype=bool)
        for index, parent in enumerate(self.inner_parents()):
            if parent >= 0:
                seen[index] |= seen[parent]
        return seen

    def draft(self, count: int) -> Draft | None:
        """Returns the best `count` nodes in the order of falling scores, so that a draft cut to its first nodes is the
        best of that size. A child never scores above its parent, so the nodes form a tree, parents first."""
        best = sorted(range(len(self.tokens)), key=lambda node: (-self._scores[node], node))[:count]
        if not best:
            return None
        indices = {node: index for index, node in enumerate(best)} | {-1: -1}
        parents = [indices[self._parents[node]] for node in best]
        confidence = [min(1.0, math.exp(self._scores[node] - self._score_of(self._parents[node]))) for node in best]
        return Draft([self.tokens[node] for node in best], parents, confidence=confidence)

    def _score_of(self, node: int) -> float:
        return self._scores[node] if node >= 0 else 0.0
