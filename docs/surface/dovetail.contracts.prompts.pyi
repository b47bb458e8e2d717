from dataclasses import dataclass
from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    token_type_ids: NotRequired[list[int]]


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    prompt: TokensPrompt
    tail: str

Prompt = str | list[int] | TextPrompt | TokensPrompt
