"""KV events in vLLM's schema, for consumers that were written for it (routers, caches outside the engine)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.contracts.router import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent


def vllm_event(event: CacheEvent) -> dict[str, Any]:
    """Returns the fields of vLLM's `BlockStored`, `BlockRemoved` or `AllBlocksCleared`, with the name under "type", as
    msgspec writes a tagged struct. Hashes are bytes, as vLLM's are by default.

    Raises `ValueError` for stored blocks without their tokens, which vLLM's consumers hash again.
    """
    match event:
        case BlocksStored():
            if len(event.token_ids) != len(event.block_hashes) * event.block_size:
                raise ValueError(
                    f"{len(event.block_hashes)} blocks of {event.block_size} tokens have {len(event.token_ids)} "
                    "token ids: vLLM's schema needs all of them"
                )
            return {
                "type": "BlockStored",
                "block_hashes": list(event.block_hashes),
                "parent_block_hash": event.parent_hash,
                "token_ids": list(event.token_ids),
                "block_size": event.block_size,
                "lora_id": None,
                "medium": event.medium,
                "lora_name": event.adapter,
            }
        case BlocksRemoved():
            return {"type": "BlockRemoved", "block_hashes": list(event.block_hashes), "medium": event.medium}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def vllm_batch(events: Sequence[CacheEvent], time: float, replica: int) -> dict[str, Any]:
    """Returns vLLM's `KVEventBatch`: events of one replica, published at `time`, in seconds since 1970."""
    return {"ts": time, "events": [vllm_event(event) for event in events], "data_parallel_rank": replica}
