"""Prompts: text, or token ids."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    """Only requests with the same salt share prefix-cache entries."""


class TokensPrompt(TypedDict):
    """A prompt as token ids; a `prompt` with them is what outputs show."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | list[int] | TextPrompt | TokensPrompt
"""What `generate` takes as one prompt."""
