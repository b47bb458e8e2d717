"""How much a store may keep."""

from __future__ import annotations

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.kv_connector import StoreSetup


def most_bytes(size_gib: float, setup: StoreSetup) -> int:
    """Of one rank. Raises `ConfigError` where not even one of its records fits."""
    size = int(size_gib * 2**30) // setup.num_ranks
    if size < setup.record_bytes:
        least = setup.record_bytes * setup.num_ranks / 2**30
        raise ConfigError(
            f"kv_connector.size_gib {size_gib:g} is too small: one block of this model takes {least:.3g} GiB, so that"
            " nothing would be kept. Set it to what some thousands of blocks take, or leave the connector out"
        )
    return size
