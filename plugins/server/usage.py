"""Counts of tokens, as clients read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dovetail.contracts.outputs import RequestMetrics, RequestOutput


def usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def with_prediction(counts: dict[str, Any], metrics: RequestMetrics) -> dict[str, Any]:
    """`usage` of a request that came with a prediction: how many draft tokens that were read from it were accepted,
    and how many were not."""
    accepted = metrics.num_accepted_from_prediction
    details = {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": metrics.num_drafted_from_prediction - accepted,
    }
    return {**counts, "completion_tokens_details": details}


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Of finished requests, with the completions that `best_of` drops."""
    given = list(outputs)
    return usage(
        sum(len(output.prompt_token_ids) for output in given),
        sum(output.metrics.num_generated_tokens for output in given),
        sum(output.num_cached_tokens for output in given),
    )
