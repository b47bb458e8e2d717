"""The two requests that one request becomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.contracts.kv_connector import TRANSFER_PARAMS

_OF_THE_ANSWER = (
    "best_of",
    "echo",
    "logprobs",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "return_accepted_spans",
    "return_token_ids",
    "stream",
    "stream_options",
    "top_logprobs",
)
"""Fields that change what is shown, and nothing of the prompt's KV blocks."""


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same prompt, for one token, with the question where its blocks are."""
    kept = {name: value for name, value in body.items() if name not in _OF_THE_ANSWER}
    return {**kept, "max_tokens": 1, "stream": False, TRANSFER_PARAMS: {"do_remote_decode": True}}


def is_computed_anyway(body: Mapping[str, Any]) -> bool:
    """Whether the decode server computes the whole prompt whatever is known of it: its log probabilities are asked."""
    return body.get("prompt_logprobs") is not None or bool(body.get("echo") and body.get("logprobs") is not None)
