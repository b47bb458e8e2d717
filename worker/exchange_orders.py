"""What an engine and its ranks say to each other about blocks of a connector's store; needs no torch, as engines do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BlockRow = tuple[int, ...]
"""The device block of each KV group that holds the same tokens."""


@dataclass(frozen=True, slots=True)
class ExchangeOrders:
    """What the engine asks of every rank."""

    saves: Sequence[tuple[bytes, BlockRow]] = ()
    """Block hash, and the blocks that have the content now."""
    loads: Sequence[tuple[int, Sequence[bytes], Mapping[str, Any]]] = ()
    """Number of the load, hashes in order of positions, and the request's `kv_transfer_params`."""
    places: Sequence[tuple[int, Sequence[BlockRow]]] = ()
    """Number of a load that has ended, and blocks for its first records; the others are dropped."""
    cancelled: Sequence[int] = ()
    """Loads whose records nobody wants."""
    waits: bool = False
    """Whether to wait until what was handed over is written."""


@dataclass(slots=True)
class ExchangeReport:
    """What one rank has done since the last report."""

    saved: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    refused: list[bytes] = field(default_factory=list)
    """Blocks that were handed over and not saved: dropped, or the store raised. They may be handed over again."""
    loaded: dict[int, int] = field(default_factory=dict)
    """By load that has ended, cancelled ones included: how many leading records are there and verified."""
    num_dropped: int = 0
    """Blocks that were not saved because the store is slower than the engine."""
    num_failed: int = 0
    """Records that the store could not write or read: it raised."""
    num_corrupt: int = 0
    """Records that were not what was written."""
    num_open: int = 0
    """Blocks to be saved and loads that have not ended."""
    num_copying: int = 0
    """Copies off the device that were not done: blocks are handed to the store by a later exchange."""
