"""The rules about encoders: what of the config has no use for a model that keeps nothing and generates nothing."""

from __future__ import annotations

from dovetail.config.resolved import ResolvedCache
from dovetail.config.schema import AUTO
from dovetail.contracts.errors import ConfigError
from dovetail.engine.resolving.resolution import Resolution

_WHY = "the model is an encoder, whose tokens see their whole prompt: it keeps no KV and generates no tokens"


def settle_encoder(state: Resolution) -> None:
    """Switches off what only models that generate have. Raises `ConfigError` for what was asked for and cannot be
    had."""
    config, cache = state.config, state.config.cache
    asked = {
        "cache.memory_gib": cache.memory_gib is not None,
        "cache.memory_fraction": cache.memory_fraction is not None,
        "cache.num_blocks": cache.num_blocks is not None,
        "cache.swap_gib": cache.swap_gib > 0,
        "cache.dtype": cache.dtype != AUTO,
        "speculative": config.speculative is not None,
        "logits_processors": bool(config.logits_processors),
    }
    for key, is_asked in asked.items():
        if is_asked:
            raise ConfigError(f"{key} ({state.layered.origin(key)}) has no use: {_WHY}; leave it out")
    state.decide("cache.prefix_caching", False, _WHY)
    state.decide("scheduler.enable_chunked_prefill", False, "an encoder computes each prompt whole, in one step")


def no_cache(state: Resolution, dtype: str) -> ResolvedCache:
    """The KV memory of an encoder: none. `dtype`: the model's."""
    return ResolvedCache(
        block_size=state.config.cache.block_size,
        dtype=dtype,
        prefix_caching=False,
        memory_bytes=0,
        memory_fraction=0.0,
        num_blocks=None,
        swap_bytes=0,
    )
