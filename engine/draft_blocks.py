"""What the KV blocks of a sequence hold besides the target's pages."""

from __future__ import annotations

from dovetail.config.resolved import ResolvedConfig
from dovetail.engine.kv.hashing import drafter_seed
from dovetail.engine.sequence import DraftBlocks


def draft_blocks(config: ResolvedConfig, name: str | None, hash_seed: bytes) -> DraftBlocks | None:
    """Of a sequence with the drafter `name`. Blocks also hold pages of a drafter's own layers, if it has any, which
    only its requests fill. One that runs the target's layers fills no more than slots that the target fills anew."""
    if name is None or config.speculation is None:
        return None
    drafter = config.speculation.drafters[name]
    if not drafter.looks_ahead:
        return None
    if not drafter.kv_cache:
        return DraftBlocks(hash_seed, 0, drafter.num_tokens)
    return DraftBlocks(drafter_seed(hash_seed, name), int(drafter.reads_next_token), drafter.num_tokens)


def drafters_in_blocks(config: ResolvedConfig) -> dict[str, int]:
    """By the name of each drafter whose pages are part of its requests' blocks: the tokens behind a block that its
    content depends on."""
    drafters = config.speculation.drafters.values() if config.speculation is not None else ()
    return {
        drafter.name: int(drafter.reads_next_token) for drafter in drafters if drafter.looks_ahead and drafter.kv_cache
    }
