"""Drafts of requests with a grammar: what it does not allow is not worth verifying."""

from __future__ import annotations

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


def _only(draft: Draft, nodes: list[int]) -> Draft:
    """The draft of these nodes, which hold the parents of each other."""
    index = {node: i for i, node in enumerate(nodes)} | {-1: -1}
    parents = None if draft.parents is None else [index[draft.parents[node]] for node in nodes]
    confidence = None if draft.confidence is None else [draft.confidence[node] for node in nodes]
    return Draft([draft.token_ids[node] for node in nodes], parents, None, confidence)
