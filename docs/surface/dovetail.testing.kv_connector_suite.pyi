from collections.abc import Iterator, Mapping
from dovetail.contracts.kv_connector import KVConnector
from dovetail.testing.suite import PluginSuite
from pathlib import Path
from typing import Any, ClassVar

RECORD_BYTES = 4096
def block_hash(index: int) -> bytes: ...
def record(index: int, rank: int = 0) -> bytes: ...

class KVConnectorSuite(PluginSuite):
    kind: ClassVar[str] = 'kv_connector'
    plugin: ClassVar[type[KVConnector]]
    options: ClassVar[Mapping[str, Any]] = {}
    small_options: ClassVar[Mapping[str, Any] | None] = None
    transfer: ClassVar[Mapping[str, Any]] = {}
    def stores(self, tmp_path: Path) -> Iterator[_Opened]: ...
