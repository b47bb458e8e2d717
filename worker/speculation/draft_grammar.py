"""Drafts of requests with a grammar: what it does not allow is not worth verifying, and what it forces comes anyway."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.contracts.speculation import Draft
from dovetail.worker.sampling.grammar_masks import GrammarMasks
from dovetail.worker.speculation.verifier import first_nodes


def cut_to_grammar(draft: Draft, seq_id: int, grammars: GrammarMasks) -> Draft:
    """The draft without what the grammar of its request forbids; the draft where it has none.

    Of nodes that were drawn (`Draft.probs`) the first one that is forbidden is kept: the rule rejects it, and
    draws from what the drafter thought too unlikely. Without it the output would have another distribution.
    """
    legal = grammars.legal_nodes(seq_id, draft.token_ids, draft.parent_indices)
    if legal is None or len(legal) == len(draft.token_ids):
        return draft
    if draft.probs is None:
        return _only(draft, legal)
    # Every node behind the last legal one but the first; of a tree all that may be drawn instead of a legal one.
    keep = len(draft.token_ids) if draft.is_tree else len(legal) + 1
    return first_nodes(draft, keep)


def begins_with(draft: Draft, token_ids: Sequence[int]) -> bool:
    """Whether some path of the draft from the root down begins with these tokens."""
    node = -1
    for token in token_ids:
        children = (i for i, parent in enumerate(draft.parent_indices) if parent == node)
        found = next((child for child in children if draft.token_ids[child] == token), None)
        if found is None:
            return False
        node = found
    return True


def put_in_front(draft: Draft | None, forced: Sequence[int]) -> Draft | None:
    """What is verified of a request whose next tokens are forced; `draft` itself where nothing has to be changed.

    Whether a draft that was drawn (`Draft.probs`) gives way must not depend on what was drawn: it always does.
    """
    if not forced or (draft is not None and draft.probs is None and begins_with(draft, forced)):
        return draft
    return Draft(list(forced))


def _only(draft: Draft, nodes: list[int]) -> Draft:
    """The draft of these nodes, which hold the parents of each other."""
    index = {node: i for i, node in enumerate(nodes)} | {-1: -1}
    parents = None if draft.parents is None else [index[draft.parents[node]] for node in nodes]
    confidence = None if draft.confidence is None else [draft.confidence[node] for node in nodes]
    return Draft([draft.token_ids[node] for node in nodes], parents, None, confidence, draft.from_prediction)
