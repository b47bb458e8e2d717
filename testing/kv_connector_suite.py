"""Conformance suite of KV connectors. A third party's test is a subclass::

    from dovetail.testing import KVConnectorSuite

    class TestMyConnector(KVConnectorSuite):
        plugin = MyConnector
        options = {"size_gib": 1}

Where a connector's options need a folder, the text `{folder}` in one of them stands for an empty one. The host verifies
every record by a checksum; what is tested here is that a connector does not have the host recompute what it could have
had, and that it neither grows without bounds nor keeps anything of the host's buffers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dovetail.contracts.kv_connector import BlockStore, ConnectorSetup, KVConnector, StoreSetup
from dovetail.testing.suite import PluginSuite

RECORD_BYTES = 4096
_NAMESPACE = bytes(range(32))


def block_hash(index: int) -> bytes:
    """32 bytes that name a block."""
    return index.to_bytes(32, "little")


def record(index: int, rank: int = 0) -> bytes:
    """The bytes of a block on a rank."""
    return bytes((index * 31 + rank * 7 + position) % 251 for position in range(RECORD_BYTES))


class KVConnectorSuite(PluginSuite):
    """Tests of every KV connector."""

    kind: ClassVar[str] = "kv_connector"
    plugin: ClassVar[type[KVConnector]]
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of the connector in a config."""
    small_options: ClassVar[Mapping[str, Any] | None] = None
    """Options under which 4 records of 4096 bytes fit, and 12 do not; None: its size has no bound."""
    transfer: ClassVar[Mapping[str, Any]] = {}
    """`kv_transfer_params` of a request that finds what these stores have."""

    @pytest.fixture
    def stores(self, tmp_path: Path) -> Iterator[_Opened]:
        """Opens connectors and stores, and closes them after the test."""
        opened = _Opened(self.plugin, self.options, tmp_path)
        yield opened
        opened.close()

    def test_gives_back_what_was_written(self, stores: _Opened) -> None:
        """Each block's own bytes, in any order."""
        store = stores.open()
        for index in range(6):
            assert block_hash(index) not in store.write(block_hash(index), memoryview(record(index)))
        for index in (5, 0, 3, 1, 4, 2):
            self._check(store, index)

    def test_what_was_never_written_is_not_there(self, stores: _Opened) -> None:
        """And no reason to raise."""
        store = stores.open()
        store.write(block_hash(1), memoryview(record(1)))
        assert store.read(block_hash(2), self.transfer) is None

    def test_copies_the_record(self, stores: _Opened) -> None:
        """The host uses its buffer again."""
        store, buffer = stores.open(), bytearray(record(1))
        store.write(block_hash(1), memoryview(buffer).toreadonly())
        buffer[:] = bytes(RECORD_BYTES)
        self._check(store, 1)

    def test_a_record_may_come_again(self, stores: _Opened) -> None:
        """From a request that computed the same block."""
        store = stores.open()
        for _ in range(3):
            store.write(block_hash(1), memoryview(record(1)))
        self._check(store, 1)

    def test_ranks_are_apart(self, stores: _Opened) -> None:
        """Each has its own part of a block."""
        ranks = [stores.open(rank, 2) for rank in range(2)]
        for rank, store in enumerate(ranks):
            store.write(block_hash(1), memoryview(record(1, rank)))
        for rank, store in enumerate(ranks):
            self._check(store, 1, rank)

    def test_namespaces_are_apart(self, stores: _Opened) -> None:
        """A store of other weights finds nothing of these."""
        store = stores.open()
        store.write(block_hash(1), memoryview(record(1)))
        stores.close_store(store)
        other = stores.open(namespace=bytes(32))
        assert other.read(block_hash(1), self.transfer) is None

    def test_removes(self, stores: _Opened) -> None:
        """What turned out to be broken is not returned again; it may be unknown."""
        store = stores.open()
        store.write(block_hash(1), memoryview(record(1)))
        store.write(block_hash(2), memoryview(record(2)))
        store.remove(block_hash(1))
        store.remove(block_hash(1))
        store.remove(block_hash(9))
        assert store.read(block_hash(1), self.transfer) is None
        self._check(store, 2)

    def test_reads_while_it_writes(self, stores: _Opened) -> None:
        """Another thread that reads meanwhile finds all of a record, or none of it."""
        store, num_writes, is_over = stores.open(), 0, threading.Event()
        deadline = time.monotonic() + 60

        def read() -> list[int]:
            wrong, num_rounds = set[int](), 0
            while not is_over.is_set() and (num_rounds < 5 or num_writes < 40):
                found = {index: store.read(block_hash(index), self.transfer) for index in range(10)}
                wrong |= {index for index, one in found.items() if one is not None and bytes(one) != record(index)}
                num_rounds += any(one is not None for one in found.values())
            return sorted(wrong)

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            try:
                while not reading.done():
                    assert time.monotonic() < deadline, "a reader does not get done while blocks are written"
                    # In turn one of the ten that are read, and one that nobody reads.
                    for index in (num_writes % 10, 10 + num_writes % 10):
                        store.write(block_hash(index), memoryview(record(index)))
                    num_writes += 1
                    time.sleep(0.001 if num_writes > 1000 else 0)  # reads may be slower than writes by far
            finally:
                is_over.set()
            wrong = reading.result()
        assert not wrong, f"blocks {wrong} were read with other bytes than were written"

    def test_is_bounded(self, stores: _Opened) -> None:
        """What makes way is reported, and not returned; what is reported as kept is."""
        if self.small_options is None:
            pytest.skip(f"{self.plugin.__name__} has no bound: small_options is None")
        store = stores.open(options=self.small_options)
        kept: set[bytes] = set()
        for index in range(12):
            kept.add(block_hash(index))
            kept -= set(store.write(block_hash(index), memoryview(record(index))))
        assert len(kept) < 12, "12 records were kept where they do not fit"
        assert kept, "nothing was kept"
        for index in range(12):
            found = store.read(block_hash(index), self.transfer)
            assert (found is not None) == (block_hash(index) in kept), f"block {index}"

    def test_looks_up_what_was_saved(self, stores: _Opened) -> None:
        """As many of the first blocks as there are, or more in hope; never more than were asked for."""
        store, connector = stores.open(), stores.connector()
        hashes = [block_hash(index) for index in range(8)]
        for index in range(3):
            store.write(hashes[index], memoryview(record(index)))
        connector.saved(hashes[:3])
        assert connector.lookup([], self.transfer) == 0
        assert 3 <= connector.lookup(hashes, self.transfer) <= 8
        assert connector.lookup(hashes[:2], self.transfer) == 2

    def test_does_not_want_what_it_has(self, stores: _Opened) -> None:
        """A block that was saved is not handed over again."""
        store, connector = stores.open(), stores.connector()
        store.write(block_hash(1), memoryview(record(1)))
        connector.saved([block_hash(1)])
        assert not connector.wants(block_hash(1))

    def test_may_hear_of_unknown_blocks(self, stores: _Opened) -> None:
        """That were removed on a rank before they were saved on all."""
        connector = stores.connector()
        connector.removed([block_hash(5)])
        connector.saved([block_hash(5)])
        connector.saved([block_hash(5)])

    def test_closes_any_number_of_times(self, stores: _Opened) -> None:
        """Both parts."""
        store, connector = stores.open(), stores.connector()
        for _ in range(2):
            store.close()
            connector.close()

    def _check(self, store: BlockStore, index: int, rank: int = 0) -> None:
        found = store.read(block_hash(index), self.transfer)
        assert found is not None, f"block {index} was written and is not there"
        assert bytes(found) == record(index, rank), f"block {index} of rank {rank} has other bytes than were written"


class _Opened:
    """Connectors and stores of one test."""

    def __init__(self, plugin: type[KVConnector], options: Mapping[str, Any], folder: Path):
        self._plugin = plugin
        self._options = options
        self._folder = folder
        self._open: list[BlockStore | KVConnector] = []

    def open(
        self,
        rank: int = 0,
        num_ranks: int = 1,
        namespace: bytes = _NAMESPACE,
        options: Mapping[str, Any] | None = None,
    ) -> BlockStore:
        """The store of a rank, as the host opens it."""
        setup = StoreSetup(namespace=namespace, rank=rank, num_ranks=num_ranks, record_bytes=RECORD_BYTES)
        store = self._plugin.open_store(self._validated(options), setup)
        self._open.append(store)
        return store

    def connector(self) -> KVConnector:
        """The part in the engine's process."""
        setup = ConnectorSetup(namespace=_NAMESPACE, num_ranks=1, block_size=16)
        connector = self._plugin(self._validated(None), setup)
        self._open.append(connector)
        return connector

    def close_store(self, store: BlockStore) -> None:
        """Before another is opened in its place."""
        self._open.remove(store)
        store.close()

    def close(self) -> None:
        """All that is open."""
        for one in self._open:
            one.close()

    def _validated(self, options: Mapping[str, Any] | None) -> Any:
        given = {key: self._filled(value) for key, value in (self._options if options is None else options).items()}
        return self._plugin.Options.model_validate(given)

    def _filled(self, value: Any) -> Any:
        return value.replace("{folder}", str(self._folder)) if isinstance(value, str) else value
