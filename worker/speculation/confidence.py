"""Cuts drafts where the drafter itself doubts them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.contracts.speculation import Draft
from dovetail.worker.speculation.verifier import first_nodes


def confident_part(draft: Draft, threshold: float) -> Draft:
    """The draft up to its last node whose path is trusted: the product of confidences along it is `threshold` or more.

    Where drafts were drawn (`Draft.probs`), a node's own confidence does not count, only that of the nodes before it:
    leaving a token out because of what was drawn would bend the distribution of the output, whatever the acceptance
    rule does. Drafts without confidences stay whole.
    """
    confidence = _confidence(draft)
    if confidence is None:
        return draft
    products = [1.0]
    count = 0
    for node, (own, parent) in enumerate(zip(confidence, draft.parent_indices, strict=True)):
        before = products[parent + 1]
        products.append(before * own)
        if (before if draft.probs is not None else before * own) >= threshold:
            count = node + 1
    return first_nodes(draft, count)


def _confidence(draft: Draft) -> Sequence[float] | None:
    if draft.confidence is not None or draft.probs is None:
        return draft.confidence
    chosen = torch.as_tensor(draft.token_ids, dtype=torch.int64, device=draft.probs.device)
    own: list[float] = draft.probs.gather(1, chosen[:, None])[:, 0].tolist()
    return own
