"""Keeps the newest blocks in a mapping."""

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.contracts.kv_connector import BlockStore, ConnectorSetup, KVConnector, StoreSetup
from dovetail.contracts.plugin import PluginOptions


class Options(PluginOptions):
    most: int = 64


class FrozenStore(BlockStore):
    def __init__(self, most: int):
        self._most = most
        self._records: dict[bytes, bytes] = {}

    def write(self, block_hash: bytes, record: memoryview) -> Sequence[bytes]:
        self._records[block_hash] = bytes(record)
        removed = list(self._records)[: -self._most]
        for one in removed:
            del self._records[one]
        return removed

    def read(self, block_hash: bytes, transfer: Mapping[str, Any]) -> bytes | None:
        return self._records.get(block_hash)

    def remove(self, block_hash: bytes) -> None:
        self._records.pop(block_hash, None)

    def close(self) -> None:
        self._records.clear()


class Frozen(KVConnector):
    contract = (1, 0)
    Options = Options

    def __init__(self, options: Options, setup: ConnectorSetup):
        super().__init__(options, setup)
        self._known: set[bytes] = set()

    @classmethod
    def open_store(cls, options: Options, setup: StoreSetup) -> BlockStore:
        assert len(setup.namespace) == 32
        assert setup.rank < setup.num_ranks
        return FrozenStore(options.most)

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
