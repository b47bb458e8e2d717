"""What the model asks of an attention backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.attention import AttentionNeed
from dovetail.engine.resolving.checkpoint import text_config
from dovetail.engine.resolving.model import ChosenModel
from dovetail.engine.resolving.resolution import Resolution


def attention_need(state: Resolution, model: ChosenModel) -> AttentionNeed:
    """What the model's queries ask of a backend, pages of the same dtype, and chains of drafts."""
    text = text_config(model.hf_config)
    slides = text.get("sliding_window") and text.get("use_sliding_window") is not False
    return AttentionNeed(
        device_type=state.environment.device_type,
        dtype=model.dtype,
        block_size=state.config.cache.block_size,
        head_sizes=frozenset({model.size.head_size}),
        sliding_window=_has_reach(text, "sliding", slides),
        soft_cap=bool(text.get("attn_logit_softcapping")),
        alibi=bool(text.get("alibi")) or text.get("position_embedding_type") == "alibi",
        batch_invariant=state.is_strict,
        kv_dtype=model.dtype,
        chunked=_has_reach(text, "chunked", text.get("attention_chunk_size")),
        latents=bool(model.size.latent_size),
        bidirectional=model.size.is_encoder,
    )


def _has_reach(text: Mapping[str, Any], word: str, otherwise: Any) -> bool:
    """Whether the config lists layers of a type with `word` in it, or `otherwise`, where it lists none."""
    layer_types = text.get("layer_types")
    if isinstance(layer_types, Sequence) and not isinstance(layer_types, str):
        return any(word in str(kind) for kind in layer_types)
    return bool(otherwise)
