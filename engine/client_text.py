"""What an engine's client does with text, off the event loop: tokenizing, rendering conversations, decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from dovetail.contracts.errors import RequestError
from dovetail.contracts.prompts import ChatPrompt, Prompt
from dovetail.contracts.sampling import SamplingParams, as_token_ids
from dovetail.engine.input_processor import InputProcessor, ProcessedInput
from dovetail.engine.tokenization.tokenizer import FastTokenizer, Tokenizer

Value = TypeVar("Value")

LONG_CHARS = 1 << 14
"""Texts from this length on are tokenized by a thread of their own, so that short ones do not wait behind them."""


class ClientText:
    """Two threads: one for short texts, one for long ones. More would take cores from the model."""

    def __init__(self, inputs: InputProcessor, tokenizer: Tokenizer | None):
        self._inputs = inputs
        self._tokenizer = tokenizer
        self._short = ThreadPoolExecutor(1, thread_name_prefix="dovetail-input")
        self._long = self._short
        if tokenizer is None or isinstance(tokenizer, FastTokenizer):  # others do not bear two threads
            self._long = ThreadPoolExecutor(1, thread_name_prefix="dovetail-long-input")

    async def process(self, prompt: Prompt, params: SamplingParams | None) -> ProcessedInput:
        """Validates and tokenizes. Raises `RequestError`."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        size = len(text) if isinstance(text, str) else 0
        return await self._run(size, partial(self._inputs.process, prompt, params))

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `EngineClient.tokenize`."""
        return await self._run(len(text), partial(self._known().encode, text, add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `EngineClient.detokenize`."""
        ids = as_token_ids("token_ids", token_ids)
        self._inputs.check_ids("token_ids", ids)
        return await self._run(4 * len(ids), partial(self._known().decode, ids, skip_special_tokens))

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatPrompt:
        """See `EngineClient.render_chat`."""
        return await self._run(_num_chars(messages), partial(_rendered, self._known(), messages, options))

    def token_texts(self, token_ids: Iterable[int]) -> list[str]:
        """See `EngineClient.token_texts`."""
        tokenizer = self._known()
        return [tokenizer.token_text(token_id) for token_id in token_ids]

    def close(self) -> None:
        """No more work is taken. Does not wait."""
        self._short.shutdown(wait=False)
        self._long.shutdown(wait=False)

    async def _run(self, num_chars: int, work: Callable[[], Value]) -> Value:
        pool = self._short if num_chars < LONG_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def _known(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer (tokenizer_mode none): it takes and gives token ids only")
        return self._tokenizer


def _rendered(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> ChatPrompt:
    text, token_ids = tokenizer.chat_prompt(messages, **options)
    tail = tokenizer.chat_tail(text, messages, **options)
    return ChatPrompt(prompt={"prompt": text, "prompt_token_ids": token_ids}, tail=tail)


def _num_chars(messages: object) -> int:
    """Characters of the strings in a conversation."""
    if isinstance(messages, str):
        return len(messages)
    if isinstance(messages, Mapping):
        return sum(map(_num_chars, messages.values()))
    return sum(map(_num_chars, messages)) if isinstance(messages, list | tuple) else 0
