"""The rules about limits: the longest sequence, and what one step may hold."""

from __future__ import annotations

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.model import ModelSize
from dovetail.contracts.scheduler import SchedulerLimits
from dovetail.engine.resolving.resolution import Resolution

_MIN_BATCHED_TOKENS = 2048
_LONG_PROMPT_SHARE = 0.04


def choose_max_model_len(
    state: Resolution, size: ModelSize, kv_tokens: int | None, trained: tuple[int, str] | None = None
) -> int:
    """Longest sequence: what is asked, or the model's own, at most what the KV memory holds (`kv_tokens`), and what an
    encoder was `trained` for: the length, and the file that says so."""
    asked = state.config.model.max_model_len
    own = size.max_model_len
    if asked is not None:
        if asked > own:
            raise ConfigError(
                f"model.max_model_len {asked} ({state.layered.origin('model.max_model_len')}) is more than the {own} "
                "positions of the model; ask for less, or extend the model with model.hf_overrides "
                "(max_position_embeddings, rope_scaling) if it stands that"
            )
        return asked
    if kv_tokens is not None and kv_tokens < own:
        if kv_tokens < 1:
            raise ConfigError(
                "the KV memory does not hold one block; give more in cache.memory_gib or cache.num_blocks"
            )
        reason = f"the KV memory holds {kv_tokens} tokens; the model has {own} positions"
        state.decide("model.max_model_len", kv_tokens, reason)
        return kv_tokens
    if trained is not None and trained[0] < own:
        length, file = trained
        reason = f"max_seq_length of {file}: what the model was trained to embed; it has {own} positions"
        state.decide("model.max_model_len", length, reason)
        return length
    state.decide("model.max_model_len", own, "the model's positions")
    return own


def set_limits(state: Resolution, max_model_len: int, *, whole_prompts: bool = False) -> SchedulerLimits:
    """What one step may hold. `whole_prompts`: the model cannot compute a prompt in parts, whatever is asked. Raises
    `ConfigError` for limits that contradict each other."""
    section = state.config.scheduler
    tokens = section.max_num_batched_tokens
    chunks = section.enable_chunked_prefill and not whole_prompts
    least = section.max_num_seqs if chunks else max(section.max_num_seqs, max_model_len)
    if tokens is None:
        tokens = max(_MIN_BATCHED_TOKENS, least)
        reason = f"{_MIN_BATCHED_TOKENS}, or what max_num_seqs and unchunked prompts need where that is more"
        state.decide("scheduler.max_num_batched_tokens", tokens, reason)
    where = state.layered.origin("scheduler.max_num_batched_tokens")
    if tokens < section.max_num_seqs:
        raise ConfigError(
            f"scheduler.max_num_batched_tokens {tokens} ({where}) is less than scheduler.max_num_seqs "
            f"{section.max_num_seqs} ({state.layered.origin('scheduler.max_num_seqs')}): every running request needs "
            "a token per step; raise the first or lower the second"
        )
    if tokens < least:
        why = "and scheduler.enable_chunked_prefill is off: the longest prompts would never run; raise the first, "
        remedy = "lower the second or allow chunks"
        if whole_prompts:
            why = "and an encoder computes each prompt whole: the longest would never run; raise the first "
            remedy = "or lower the second"
        raise ConfigError(
            f"scheduler.max_num_batched_tokens {tokens} ({where}) is less than model.max_model_len {max_model_len}, "
            f"{why}{remedy}"
        )
    if section.max_long_partial_prefills > section.max_num_partial_prefills:
        raise ConfigError(
            f"scheduler.max_long_partial_prefills {section.max_long_partial_prefills} is more than "
            f"scheduler.max_num_partial_prefills {section.max_num_partial_prefills}: long prompts are among these"
        )
    return SchedulerLimits(
        max_num_batched_tokens=tokens,
        max_num_seqs=section.max_num_seqs,
        max_model_len=max_model_len,
        enable_chunked_prefill=chunks,
        max_num_partial_prefills=section.max_num_partial_prefills,
        max_long_partial_prefills=section.max_long_partial_prefills,
        long_prefill_token_threshold=_long_threshold(state, max_model_len),
    )


def _long_threshold(state: Resolution, max_model_len: int) -> int:
    section = state.config.scheduler
    threshold = section.long_prefill_token_threshold
    if threshold is None:
        several = section.max_num_partial_prefills > 1
        threshold = int(_LONG_PROMPT_SHARE * max_model_len) if several else 0
        reason = (
            f"{_LONG_PROMPT_SHARE:.0%} of max_model_len" if several else "one partial prefill at a time: none is long"
        )
        state.decide("scheduler.long_prefill_token_threshold", threshold, reason)
    return threshold
