"""Greedy acceptance: a draft stands if it is the target's most likely token (Stern et al. 2018, arXiv 1811.03115)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from dovetail.contracts.speculation import AcceptanceRule, Draft, Verdict, VerifyRequest


class GreedyRule(AcceptanceRule):
    """Token for token what greedy decoding without drafts gives, for chains and trees."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    lossless = True
    trees = True
    greedy_only = True

    def verify(self, requests: Sequence[VerifyRequest]) -> Sequence[Verdict]:
        return [_walk(request.draft, request.target_tokens) for request in requests]


def _walk(draft: Draft, best: Sequence[int]) -> Verdict:
    """Down from the root, as long as some child is the best token. Parents precede children, so one pass suffices."""
    path: list[int] = []
    last = -1
    for node, token in enumerate(draft.token_ids):
        parent = node - 1 if draft.parents is None else draft.parents[node]
        if parent == last and token == best[last + 1]:
            path.append(node)
            last = node
    return Verdict(path, best[last + 1])
