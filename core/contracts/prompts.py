"""Prompts: text, or token ids."""

from __future__ import annotations

from dataclasses import dataclass
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
    token_type_ids: NotRequired[list[int]]
    """The type of each token, for models whose tokens have types: which text of a pair it is of. Left out: all 0."""


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """The prompt of a conversation."""

    prompt: TokensPrompt
    tail: str
    """What of its text is behind the last whole message: the generation prompt, and the text of a message that is to
    be continued. See `DialectRequest.prompt_tail`."""


Prompt = str | list[int] | TextPrompt | TokensPrompt
"""What `generate` takes as one prompt."""
