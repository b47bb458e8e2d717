"""Prompts of a data set as a load."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from dovetail import LLMEngine
from dovetail.commands.checks import require
from dovetail.commands.datasets import Prompt, read_prompts
from dovetail.contracts.errors import ConfigError
from dovetail.plugins.commands.bench.workloads import Load


def read_dataset(path: Path, engine: LLMEngine, output_tokens: int, limit: int | None) -> Load:
    """The first `limit` prompts (None: all) as a load; a line's own "output_tokens" go before the given ones. Raises
    `ConfigError` with the line that cannot be used."""
    _, prompts = read_prompts("--dataset", path)
    chosen = list(islice(prompts, limit))
    tokens = [_tokens(prompt, engine) for prompt in chosen]
    return Load(path.name, tokens, [prompt.output_tokens or output_tokens for prompt in chosen])


def _tokens(prompt: Prompt, engine: LLMEngine) -> list[int]:
    if prompt.token_ids is not None:
        vocab_size = engine.config.model.vocab_size
        require(
            all(token < vocab_size for token in prompt.token_ids),
            f"{prompt.origin}: the model has token ids 0 to {vocab_size - 1} only",
        )
        return list(prompt.token_ids)
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{prompt.origin} is text, and this engine has no tokenizer: give prompt_token_ids")
    tokens = tokenizer.encode(prompt.text or "")
    require(bool(tokens), f"{prompt.origin}: the prompt has no tokens")
    return tokens
