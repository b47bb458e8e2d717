"""Which tokens a drafter guessed, as clients read it: the extra field `return_accepted_spans` of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dovetail.contracts.outputs import RequestMetrics, Span


def marked_tokens(
    token_ids: Sequence[int], spans: Iterable[Span], token_texts: Callable[[Iterable[int]], list[str]]
) -> list[dict[str, Any]]:
    """Each token's text, and whether it is an accepted draft. A token that is part of a character reads U+FFFD."""
    accepted = {position for start, count in spans for position in range(start, start + count)}
    return [{"text": text, "accepted": position in accepted} for position, text in enumerate(token_texts(token_ids))]


def speculation_of(metrics: RequestMetrics) -> dict[str, Any] | None:
    """What became of a finished request's drafts; None where it had no drafter."""
    if metrics.drafter is None:
        return None
    return {
        "drafter": metrics.drafter,
        "num_rounds": metrics.num_draft_rounds,
        "num_drafted": metrics.num_drafted,
        "num_accepted": metrics.num_accepted,
        "acceptance_rate": metrics.acceptance_rate,
        "mean_accepted_length": metrics.mean_accepted_length,
        "error": metrics.drafter_error,
    }
