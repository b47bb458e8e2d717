from dataclasses import dataclass
from enum import StrEnum
from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    token_type_ids: NotRequired[list[int]]


class PrefixOutcome(StrEnum):
    SAME = 'same'
    RETOKENIZED = 'retokenized'
    REWRITTEN = 'rewritten'
    NO_EOS = 'no_eos'
    DROPPED_TURN = 'dropped_turn'


@dataclass(frozen=True)
class PrefixVerdict:
    preserved: bool
    outcome: PrefixOutcome
    index: int | None
    turn: int | None
    resumed_at: int
    message: str


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    prompt: TokensPrompt
    tail: str
    prefix: PrefixVerdict | None = None

Prompt = str | list[int] | TextPrompt | TokensPrompt
