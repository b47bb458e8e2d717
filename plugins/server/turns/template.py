"""What a request gives the chat template besides the conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.contracts.route import APIError

_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "keep_rewritten",
        "messages",
        "required_prefix_token_ids",
        "self",
        "text",
        "tokenize",
        "tools",
    }
)
"""Names with a meaning of their own where templates are rendered."""


def template_variables(given: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """`chat_template_kwargs`. Raises `APIError` 400 that names the one which no request may set."""
    taken = sorted(_RESERVED & (given or {}).keys())
    if taken:
        message = f"chat_template_kwargs.{taken[0]}: this name is the server's; the field of the request says it"
        if taken[0] in ("self", "text", "tokenize"):
            message = f"chat_template_kwargs.{taken[0]}: this name is the server's: leave it out"
        raise APIError(400, message, param=f"chat_template_kwargs.{taken[0]}")
    return given or {}
