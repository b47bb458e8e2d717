"""KV events as vLLM publishes them: msgpack of these records, as maps, with the name of an event under "type"."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dovetail.contracts.router import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent


class Stored(msgspec.Struct, tag="BlockStored"):
    """vLLM's `BlockStored`."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    """vLLM's `BlockRemoved`."""

    block_hashes: tuple[bytes, ...]
    medium: str | None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    """vLLM's `AllBlocksCleared`."""


class Batch(msgspec.Struct):
    """vLLM's `KVEventBatch`."""

    ts: float
    """Seconds since 1970."""
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None


def batch_of(events: Sequence[CacheEvent], time: float, replica: int) -> Batch:
    """What is published of one step. Raises `ValueError` for stored blocks without their tokens, which vLLM's consumers
    hash again."""
    return Batch(time, [_event(event) for event in events], replica)


def _event(event: CacheEvent) -> Stored | Removed | Cleared:
    match event:
        case BlocksStored():
            if len(event.token_ids) != len(event.block_hashes) * event.block_size:
                raise ValueError(
                    "vLLM's schema has the tokens of all blocks, and a running engine does not know those of blocks"
                    " that it has already: name the sink in the engine's config"
                )
            return Stored(
                event.block_hashes,
                event.parent_hash,
                event.token_ids,
                event.block_size,
                None,
                event.medium,
                event.adapter,
            )
        case BlocksRemoved():
            return Removed(event.block_hashes, event.medium)
        case AllBlocksCleared():
            return Cleared()
