"""Which tokens a drafter guessed, as clients read it: the extra field `return_accepted_spans` of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dovetail.contracts.outputs import CompletionOutput, RequestMetrics, RequestOutput, Span


def accepted_fields(
    output: RequestOutput, completion: CompletionOutput, token_texts: Callable[[Iterable[int]], list[str]]
) -> dict[str, Any]:
    """Fields of a choice: its tokens, marked, and in the request's last output what became of its drafts."""
    fields: dict[str, Any] = {"tokens": _marked(completion.token_ids, completion.accepted_spans, token_texts)}
    if output.finished:
        fields["speculation"] = _speculation(output.metrics)
    return fields


def _marked(
    token_ids: Sequence[int], spans: Iterable[Span], token_texts: Callable[[Iterable[int]], list[str]]
) -> list[dict[str, Any]]:
    """Each token's text, and whether it is an accepted draft. A token that is part of a character reads U+FFFD."""
    accepted = {position for start, count in spans for position in range(start, start + count)}
    return [{"text": text, "accepted": position in accepted} for position, text in enumerate(token_texts(token_ids))]


def _speculation(metrics: RequestMetrics) -> dict[str, Any] | None:
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
