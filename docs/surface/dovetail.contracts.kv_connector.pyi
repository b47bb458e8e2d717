from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dovetail.contracts.plugin import Plugin, PluginOptions
from typing import Any

TRANSFER_PARAMS = 'kv_transfer_params'

@dataclass(frozen=True, kw_only=True)
class ConnectorSetup:
    namespace: bytes
    num_ranks: int
    block_size: int


@dataclass(frozen=True, kw_only=True)
class StoreSetup:
    namespace: bytes
    rank: int
    num_ranks: int
    record_bytes: int


class BlockStore(ABC):
    @abstractmethod
    def write(self, block_hash: bytes, record: memoryview) -> Sequence[bytes]: ...
    @abstractmethod
    def read(
        self,
        block_hash: bytes,
        transfer: Mapping[str, Any],
    ) -> bytes | bytearray | memoryview | None: ...
    @abstractmethod
    def remove(self, block_hash: bytes) -> None: ...
    @abstractmethod
    def close(self) -> None: ...


class KVConnector(Plugin):
    def __init__(self, options: PluginOptions, setup: ConnectorSetup): ...
    options: PluginOptions
    setup: ConnectorSetup
    @classmethod
    @abstractmethod
    def open_store(cls, options: Any, setup: StoreSetup) -> BlockStore: ...
    @classmethod
    def transfer_params(cls, options: Any) -> Mapping[str, Any]: ...
    @abstractmethod
    def lookup(self, block_hashes: Sequence[bytes], transfer: Mapping[str, Any]) -> int: ...
    @abstractmethod
    def wants(self, block_hash: bytes) -> bool: ...
    @abstractmethod
    def saved(self, block_hashes: Sequence[bytes]) -> None: ...
    @abstractmethod
    def removed(self, block_hashes: Sequence[bytes]) -> None: ...
    @abstractmethod
    def close(self) -> None: ...
