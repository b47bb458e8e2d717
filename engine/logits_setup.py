"""What logits processors are told about the model, in the engine and in its workers."""

from __future__ import annotations

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.logits import LogitsSetup
from dovetail.engine.tokenization.tokenizer import Tokenizer


def logits_setup(config: ResolvedConfig, tokenizer: Tokenizer | None) -> LogitsSetup:
    """The record that `LogitsProcessor` is created with."""
    return LogitsSetup(
        vocab_size=config.model.vocab_size,
        eos_token_ids=config.model.eos_token_ids,
        tokenizer_json=tokenizer.tokenizer_json if tokenizer is not None else None,
    )
