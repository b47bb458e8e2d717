"""Blocks that the device's cache evicts stay in host memory, as long as they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from dovetail.contracts.kv_connector import BlockStore, ConnectorSetup, KVConnector, StoreSetup
from dovetail.contracts.plugin import PluginOptions
from dovetail.plugins.kv_connectors.recent_records import RecentRecords
from dovetail.plugins.kv_connectors.sizes import most_bytes


class HostOptions(PluginOptions):
    """What a config may say besides the name."""

    size_gib: float = Field(default=4.0, gt=0)
    """Host memory for blocks, over all ranks, in GiB."""


class HostStore(BlockStore):
    """The records of one rank, in this process."""

    def __init__(self, records: RecentRecords):
        self._records = records

    def write(self, block_hash: bytes, record: memoryview) -> Sequence[bytes]:
        return self._records.put(block_hash, record)

    def read(self, block_hash: bytes, transfer: Mapping[str, Any]) -> bytes | None:
        return self._records.get(block_hash)

    def remove(self, block_hash: bytes) -> None:
        self._records.remove(block_hash)

    def close(self) -> None:
        self._records.clear()


class Host(KVConnector):
    """Host memory, the least recently used blocks removed first. It ends with the engine."""

    contract: ClassVar[tuple[int, int]] = (1, 0)
    Options = HostOptions
    options: HostOptions

    def __init__(self, options: PluginOptions, setup: ConnectorSetup):
        super().__init__(options, setup)
        self._known: set[bytes] = set()

    @classmethod
    def open_store(cls, options: HostOptions, setup: StoreSetup) -> BlockStore:
        return HostStore(RecentRecords(most_bytes(options.size_gib, setup)))

    def lookup(self, block_hashes: Sequence[bytes], transfer: Mapping[str, Any]) -> int:
        return next((i for i, one in enumerate(block_hashes) if one not in self._known), len(block_hashes))

    def wants(self, block_hash: bytes) -> bool:
        return block_hash not in self._known

    def saved(self, block_hashes: Sequence[bytes]) -> None:
        self._known.update(block_hashes)

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        self._known.difference_update(block_hashes)

    def close(self) -> None:
        self._known.clear()
