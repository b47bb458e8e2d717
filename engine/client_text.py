"""What an engine's client does with text, off the event loop: tokenizing, rendering conversations, decoding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from dovetail.contracts.engine_client import RequestPlan
from dovetail.contracts.errors import RequestError
from dovetail.contracts.pooling_params import PoolingParams
from dovetail.contracts.prompts import ChatPrompt, Prompt, TokensPrompt
from dovetail.contracts.sampling import SamplingParams, as_token_ids
from dovetail.engine.input_processor import InputProcessor, ProcessedInput
from dovetail.engine.tokenization.prefix_tokens import replace_prefix_tokens
from dovetail.engine.tokenization.tokenizer import FastTokenizer, Tokenizer

Value = TypeVar("Value")

LONG_CHARS = 1 << 14
"""Texts from this length on are tokenized by a thread of their own, so that short ones do not wait behind them."""
INSTANT_CHARS = 256
"""Shorter texts are tokenized where they are: handing them to a thread takes longer."""


class ClientText:
    """Two threads: one for short texts, one for long ones. More would take cores from the model. What takes less than
    handing it over is done by the caller's."""

    def __init__(self, inputs: InputProcessor, tokenizer: Tokenizer | None):
        self._inputs = inputs
        self._tokenizer = tokenizer
        self._short = ThreadPoolExecutor(1, thread_name_prefix="dovetail-input")
        self._long = self._short
        self._instant_chars = 0
        if tokenizer is None or isinstance(tokenizer, FastTokenizer):  # others do not bear two threads
            self._long = ThreadPoolExecutor(1, thread_name_prefix="dovetail-long-input")
            self._instant_chars = INSTANT_CHARS

    async def process(self, prompt: Prompt, params: SamplingParams | PoolingParams | None) -> ProcessedInput:
        """Validates and tokenizes. Raises `RequestError`."""
        size = _size(prompt)
        if isinstance(params, SamplingParams) and params.bad_words:
            size = max(size, INSTANT_CHARS)  # each of them is tokenized
        return await self._run(size, partial(self._inputs.process, prompt, params))

    async def plan(self, prompt: Prompt, params: SamplingParams | None) -> RequestPlan:
        """See `EngineClient.plan_request`."""
        processed = await self.process(prompt, params)
        return RequestPlan(
            num_prompt_tokens=len(processed.token_ids),
            max_tokens=processed.max_total_tokens - len(processed.token_ids),
            drafter=processed.drafter,
            grammar_form=processed.grammar.spec.form if processed.grammar is not None else None,
        )

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See `EngineClient.tokenize`."""
        return await self._run(len(text), partial(self._known().encode, text, add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `EngineClient.detokenize`."""
        ids = as_token_ids("token_ids", token_ids)
        self._inputs.check_ids("token_ids", ids)
        return await self._run(4 * len(ids), partial(self._known().decode, ids, skip_special_tokens))

    async def pair_prompt(self, first: Prompt, second: Prompt, *, truncate_prompt_tokens: int | None = None) -> Prompt:
        """See `EngineClient.pair_prompt`."""
        pair = partial(self._inputs.pair, first, second, truncate_prompt_tokens)
        return await self._run(_size(first) + _size(second), pair)

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatPrompt:
        """See `EngineClient.render_chat`."""
        size = max(_num_chars(messages), INSTANT_CHARS)  # templates take longer than their text, and read tools too
        prefix, keeps = options.pop("required_prefix_token_ids", None), options.pop("keep_rewritten", False)
        if type(keeps) is not bool:
            raise RequestError(f"keep_rewritten must be true or false, got {keeps!r}")
        if prefix is None:
            if keeps:
                raise RequestError("keep_rewritten is about required_prefix_token_ids: give those too, or leave it out")
            return await self._run(size, partial(_rendered, self._known(), messages, options))
        ids = as_token_ids("required_prefix_token_ids", prefix)
        self._inputs.check_ids("required_prefix_token_ids", ids)
        eos_token_ids = self._inputs.eos_token_ids
        return await self._run(size, partial(_continued, self._known(), messages, options, ids, eos_token_ids, keeps))

    def token_texts(self, token_ids: Iterable[int]) -> list[str]:
        """See `EngineClient.token_texts`."""
        tokenizer = self._known()
        return [tokenizer.token_text(token_id) for token_id in token_ids]

    def close(self) -> None:
        """No more work is taken. Does not wait."""
        self._short.shutdown(wait=False)
        self._long.shutdown(wait=False)

    async def _run(self, num_chars: int, work: Callable[[], Value]) -> Value:
        if num_chars < self._instant_chars:
            return work()
        pool = self._short if num_chars < LONG_CHARS else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def _known(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("this engine has no tokenizer (tokenizer_mode none): it takes and gives token ids only")
        return self._tokenizer


def _size(prompt: Prompt) -> int:
    """Characters or token ids. Ids are only checked, which is faster still."""
    parts = [prompt.get("prompt"), prompt.get("prompt_token_ids")] if isinstance(prompt, Mapping) else [prompt]
    return max((len(part) for part in parts if isinstance(part, Sized)), default=0)


def _rendered(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> ChatPrompt:
    text, token_ids = tokenizer.chat_prompt(messages, **options)
    tail = tokenizer.chat_tail(text, messages, **options)
    return ChatPrompt(prompt={"prompt": text, "prompt_token_ids": token_ids}, tail=tail)


def _continued(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    model_ids: Sequence[int],
    eos_token_ids: Sequence[int],
    keep_rewritten: bool,
) -> ChatPrompt:
    """As `_rendered`, with `model_ids` in place of what the template has for the same turns."""
    if not eos_token_ids:
        raise RequestError("required_prefix_token_ids: the model has no end token, by which turns could be told apart")
    chat = _rendered(tokenizer, messages, options)
    ends = [index for index, message in enumerate(messages, 1) if message.get("role") == "assistant"]
    so_far = messages[: ends[-1]] if ends else messages
    whole = {"add_generation_prompt": False, "continue_final_message": False}
    _, so_far_ids = tokenizer.chat_prompt(so_far, **{**options, **whole})

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    rendering = chat.prompt["prompt_token_ids"]
    try:
        ids, verdict = replace_prefix_tokens(
            model_ids,
            so_far_ids,
            rendering,
            eos_token_ids=eos_token_ids,
            decode=decode,
            keep_rewritten=keep_rewritten,
        )
    except ValueError as error:
        raise RequestError(f"required_prefix_token_ids: {error}") from error
    prompt: TokensPrompt = chat.prompt if ids == rendering else {"prompt": decode(ids), "prompt_token_ids": ids}
    return replace(chat, prompt=prompt, prefix=verdict)


def _num_chars(messages: object) -> int:
    """Characters of the strings in a conversation."""
    if isinstance(messages, str):
        return len(messages)
    if isinstance(messages, Mapping):
        return sum(map(_num_chars, messages.values()))
    return sum(map(_num_chars, messages)) if isinstance(messages, list | tuple) else 0
