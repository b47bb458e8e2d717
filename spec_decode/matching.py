"""Finds earlier occurrences of a text's last tokens, and what most often follows them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOTHING = -1
"""Marks the entries before the first and after the last token of a text."""
MAX_MATCHES = 256
"""Of more places that end like the text, only the latest are looked at: the cost of a guess is bounded."""
MAX_COUNTED = 32
"""Of more occurrences of one match, only the latest are counted: enough to tell what is frequent."""
_GLANCE = 4
"""Tokens that are compared first, which suffice for most matches; longer windows follow."""


@dataclass(frozen=True)
class Guess:
    """Draft nodes, parents before children, and their probabilities."""

    token_ids: list[int]
    parents: list[int]
    probs: list[float]
    """How likely each node is to be right, those before it included, if what follows is distributed as before."""
    place: int
    """Index, in the text, of the token after the latest of the occurrences that the guess was read from."""

    @property
    def score(self) -> float:
        """How many of the nodes will be right, in the mean."""
        return sum(self.probs)

    def confidence(self) -> list[float]:
        """How likely each node is to be right if the one before it is."""
        before = [1.0 if parent < 0 else self.probs[parent] for parent in self.parents]
        return [min(1.0, own / given) for own, given in zip(self.probs, before, strict=True)]


def padded(tokens: NDArray[np.int32], before: int, after: int) -> NDArray[np.int32]:
    """Returns a copy with `before` empty entries in front and `after` behind."""
    text = np.full(before + len(tokens) + after, NOTHING, dtype=np.int32)
    text[before : before + len(tokens)] = tokens
    return text


def match_lengths(text: NDArray[np.int32], ends: NDArray[np.int64], suffix: NDArray[np.int32]) -> NDArray[np.int64]:
    """For each of `ends`, how many tokens of `text` before it equal the last ones of `suffix`; at most all of it.

    Every end has at least `len(suffix)` places before it.
    """
    lengths = _match_lengths(text, ends, suffix[-_GLANCE:])
    if len(suffix) > _GLANCE:
        longer = (lengths == _GLANCE).nonzero()[0]
        if len(longer):
            lengths[longer] = _match_lengths(text, ends[longer], suffix)
    return lengths


def _match_lengths(text: NDArray[np.int32], ends: NDArray[np.int64], suffix: NDArray[np.int32]) -> NDArray[np.int64]:
    count = len(suffix)
    equal = np.ones((len(ends), count + 1), dtype=bool)
    windows = text[ends[:, None] + np.arange(-1, -count - 1, -1)]
    np.not_equal(windows, suffix[::-1], out=equal[:, :count])
    # The first place that differs; the last column says that none does.
    return equal.argmax(1)


def best_guess(
    text: NDArray[np.int32],
    ends: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    min_match: int,
    max_nodes: int,
    spec_factor: float,
    min_prob: float,
    tree: bool,
) -> Guess | None:
    """The guess with the highest score over all match lengths; of equal ones that of the longest match.

    Args:
        text: tokens, with space for `max_nodes` more after the last of `ends`.
        ends: indices after occurrences, ascending.
        lengths: how many tokens match before each.
        spec_factor: a match of n tokens gives at most `spec_factor` * n nodes.
    """
    best = None
    for length in sorted(set(lengths.tolist()), reverse=True):
        budget = min(max_nodes, int(spec_factor * length))
        # No match gives more right nodes than it may have nodes, and shorter ones may have fewer.
        if length < min_match or budget == 0 or (best is not None and best.score >= budget):
            break
        chosen = ends[lengths >= length][-MAX_COUNTED:]
        follows = text[chosen[:, None] + np.arange(budget)].tolist()
        token_ids, parents, probs = (grow if tree else chain)(follows, budget, min_prob)
        guess = Guess(token_ids, parents, probs, int(chosen[-1]))
        if token_ids and (best is None or guess.score > best.score):
            best = guess
    return best


def chain(
    follows: Sequence[Sequence[int]], max_nodes: int, min_prob: float
) -> tuple[list[int], list[int], list[float]]:
    """The most likely continuation, token by token, its parents, and its probabilities; see `grow`."""
    token_ids: list[int] = []
    probs: list[float] = []
    prob = 1.0
    rows = follows
    while len(token_ids) < max_nodes and prob >= min_prob:
        place = len(token_ids)
        if len(rows) == 1:
            rest = rows[0][place:]
            rest = rest[: rest.index(NOTHING)] if NOTHING in rest else rest
            token_ids += rest
            probs += [prob] * len(rest)
            break
        following = [row[place] for row in rows]
        counts: dict[int, int] = {}
        # Of equally frequent ones max takes the first, so the latest come first.
        for token in reversed(following):
            counts[token] = counts.get(token, 0) + 1
        counts.pop(NOTHING, None)
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)
        prob = prob * counts[token] / len(rows)
        if prob < min_prob:
            break
        rows = [row for row, follower in zip(rows, following, strict=True) if follower == token]
        token_ids.append(token)
        probs.append(prob)
    return token_ids, list(range(-1, len(token_ids) - 1)), probs


def grow(follows: Sequence[Sequence[int]], max_nodes: int, min_prob: float) -> tuple[list[int], list[int], list[float]]:
    """The tree of the most likely continuations, its parents, and its probabilities.

    `follows` has one row per occurrence, oldest first; a row ends where it says `NOTHING`. A token's probability is the
    share of the occurrences of what precedes it that go on with it, times that of its parent; of equally likely
    ones the latest is taken. Nodes below `min_prob` are left out.
    """
    token_ids: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    order = itertools.count()
    waiting: list[tuple[float, int, int, int, int, list[Sequence[int]]]] = []

    def offer(parent: int, depth: int, prob: float, rows: Sequence[Sequence[int]]) -> None:
        if depth == len(rows[0]):
            return
        groups: dict[int, list[Sequence[int]]] = {}
        for row in reversed(rows):
            groups.setdefault(row[depth], []).append(row)
        groups.pop(NOTHING, None)
        for token, group in groups.items():
            child = prob * len(group) / len(rows)
            if child >= min_prob:
                heapq.heappush(waiting, (-child, next(order), parent, depth, token, group[::-1]))

    offer(-1, 0, 1.0, follows)
    while waiting and len(token_ids) < max_nodes:
        negative, _, parent, depth, token, rows = heapq.heappop(waiting)
        token_ids.append(token)
        parents.append(parent)
        probs.append(-negative)
        offer(len(token_ids) - 1, depth + 1, -negative, rows)
    return token_ids, parents, probs
