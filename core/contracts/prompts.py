"""Prompts: text, or token ids."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
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


class PrefixOutcome(StrEnum):
    """How a rendering of a conversation compares with the ids that the model saw and produced."""

    SAME = "same"
    """The rendering starts with the model's ids."""
    RETOKENIZED = "retokenized"
    """The same text in other ids, or another EOS at the end of the model's turn."""
    REWRITTEN = "rewritten"
    """Other text: the template trims, strips reasoning, adds or removes messages, ..."""
    NO_EOS = "no_eos"
    """The template writes no EOS at the end of the model's turn."""
    DROPPED_TURN = "dropped_turn"
    """A rendering has fewer turns than the model saw and produced."""


@dataclass(frozen=True)
class PrefixVerdict:
    """What became of the model's ids in the next prompt."""

    preserved: bool
    """Whether the prompt starts with all of the model's ids."""
    outcome: PrefixOutcome
    index: int | None
    """First index at which the rendering differs from the model's ids, or at which it ends; None where it starts with
    all of them."""
    turn: int | None
    """Number, from 0, of the first turn whose text differs; a turn is what an EOS ends. None where none does."""
    resumed_at: int
    """Index in the rendering from which on the prompt consists of the template's ids: 0 where it is the rendering."""
    message: str
    """What happened, in a sentence."""


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """The prompt of a conversation."""

    prompt: TokensPrompt
    tail: str
    """What of its text is behind the last whole message: the generation prompt, and the text of a message that is to
    be continued. See `DialectRequest.prompt_tail`."""
    prefix: PrefixVerdict | None = None
    """What became of `required_prefix_token_ids`; None where none were given."""


Prompt = str | list[int] | TextPrompt | TokensPrompt
"""What `generate` takes as one prompt."""
