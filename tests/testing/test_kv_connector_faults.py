"""What the suite of KV connectors finds: each a change in a connector that passes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from pydantic import Field

from dovetail.contracts.kv_connector import BlockStore, ConnectorSetup, KVConnector, StoreSetup
from dovetail.contracts.plugin import PluginOptions
from dovetail.testing.faults import Fault, check_fault
from dovetail.testing.kv_connector_suite import KVConnectorSuite


class Options(PluginOptions):
    most: int = Field(default=100, ge=1)


class Memory(BlockStore):
    """The newest records, by rank and namespace."""

    def __init__(self, options: Options, setup: StoreSetup):
        self.most = options.most
        self.key = setup.namespace, setup.rank
        self.records: dict[Any, bytes] = {}

    def write(self, block_hash: bytes, record: memoryview) -> Sequence[bytes]:
        self.records[*self.key, block_hash] = bytes(record)
        oldest = list(self.records)[: -self.most]
        for key in oldest:
            del self.records[key]
        return [key[2] for key in oldest]

    def read(self, block_hash: bytes, transfer: Mapping[str, Any]) -> bytes | memoryview | None:
        return self.records.get((*self.key, block_hash))

    def remove(self, block_hash: bytes) -> None:
        self.records.pop((*self.key, block_hash), None)

    def close(self) -> None:
        self.records.clear()


class Sound(KVConnector):
    contract = (1, 0)
    Options = Options
    store: ClassVar[type[Memory]] = Memory

    def __init__(self, options: PluginOptions, setup: ConnectorSetup):
        super().__init__(options, setup)
        self.known: set[bytes] = set()

    @classmethod
    def open_store(cls, options: Options, setup: StoreSetup) -> BlockStore:
        return cls.store(options, setup)

    def lookup(self, block_hashes: Sequence[bytes], transfer: Mapping[str, Any]) -> int:
        return next((i for i, one in enumerate(block_hashes) if one not in self.known), len(block_hashes))

    def wants(self, block_hash: bytes) -> bool:
        return block_hash not in self.known

    def saved(self, block_hashes: Sequence[bytes]) -> None:
        self.known.update(block_hashes)

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        self.known.difference_update(block_hashes)

    def close(self) -> None:
        self.known.clear()


def _with(store: type[Memory]) -> type[Sound]:
    """The sound connector with a store that is not."""
    return type(store.__name__ + "Connector", (Sound,), {"store": store})


class Flips(Memory):
    def read(self, block_hash: bytes, transfer: Mapping[str, Any]) -> bytes | None:
        found = super().read(block_hash, transfer)
        return bytes([bytes(found)[0] ^ 1, *bytes(found)[1:]]) if found is not None else None


class Raises(Memory):
    def read(self, block_hash: bytes, transfer: Mapping[str, Any]) -> bytes | memoryview | None:
        return self.records[*self.key, block_hash]


class Borrows(Memory):
    def write(self, block_hash: bytes, record: memoryview) -> Sequence[bytes]:
        self.records[*self.key, block_hash] = record  # type: ignore[assignment]
        return []


class Adds(Memory):
    def write(self, block_hash: bytes, record: memoryview) -> Sequence[bytes]:
        self.records[*self.key, block_hash] = self.records.get((*self.key, block_hash), b"") + bytes(record)
        return []


class OneForAll(Memory):
    everywhere: ClassVar[dict[Any, bytes]] = {}

    def __init__(self, options: Options, setup: StoreSetup):
        super().__init__(options, setup)
        self.records = self.everywhere


class IgnoresRanks(OneForAll):
    everywhere: ClassVar[dict[Any, bytes]] = {}

    def __init__(self, options: Options, setup: StoreSetup):
        super().__init__(options, setup)
        self.key = setup.namespace, 0


class IgnoresNamespaces(OneForAll):
    everywhere: ClassVar[dict[Any, bytes]] = {}

    def __init__(self, options: Options, setup: StoreSetup):
        super().__init__(options, setup)
        self.key = b"", setup.rank

    def close(self) -> None:
        return None


class NeverRemoves(Memory):
    def remove(self, block_hash: bytes) -> None:
        return None


class Hides(Memory):
    def write(self, block_hash: bytes, record: memoryview) -> Sequence[bytes]:
        super().write(block_hash, record)
        return []


class Grows(Memory):
    def __init__(self, options: Options, setup: StoreSetup):
        super().__init__(options, setup)
        self.most = 1000


class Torn(Memory):
    """A reader that comes while a block is written again finds half of it. Once, such a reader is waited for."""

    def __init__(self, options: Options, setup: StoreSetup):
        super().__init__(options, setup)
        self.is_read = threading.Event()

    def read(self, block_hash: bytes, transfer: Mapping[str, Any]) -> bytes | memoryview | None:
        found = super().read(block_hash, transfer)
        if found is not None and len(found) == 100:
            self.is_read.set()
        return found

    def write(self, block_hash: bytes, record: memoryview) -> Sequence[bytes]:
        again = self.records.get((*self.key, block_hash)) is not None
        self.records[*self.key, block_hash] = bytes(record[:100])
        if again:
            self.is_read.wait(60)
        return super().write(block_hash, record)


class ClaimsMore(Sound):
    def lookup(self, block_hashes: Sequence[bytes], transfer: Mapping[str, Any]) -> int:
        return len(block_hashes) + 1


class CountsAll(Sound):
    def lookup(self, block_hashes: Sequence[bytes], transfer: Mapping[str, Any]) -> int:
        return 0


class Wants(Sound):
    def wants(self, block_hash: bytes) -> bool:
        return True


class Strict(Sound):
    def removed(self, block_hashes: Sequence[bytes]) -> None:
        for one in block_hashes:
            self.known.remove(one)


class ClosesOnce(Sound):
    def close(self) -> None:
        del self.known


FAULTS = [
    Fault("changes a bit", _with(Flips), "test_gives_back_what_was_written"),
    Fault("raises for what is not there", _with(Raises), "test_what_was_never_written_is_not_there"),
    Fault("keeps the host's buffer", _with(Borrows), "test_copies_the_record"),
    Fault("appends to a record that comes again", _with(Adds), "test_a_record_may_come_again"),
    Fault("has one record for all ranks", _with(IgnoresRanks), "test_ranks_are_apart"),
    Fault("does not look at the namespace", _with(IgnoresNamespaces), "test_namespaces_are_apart"),
    Fault("returns a broken record again", _with(NeverRemoves), "test_removes"),
    Fault("shows records that are half written", _with(Torn), "test_reads_while_it_writes"),
    Fault("does not report what it removed", _with(Hides), "test_is_bounded"),
    Fault("grows without bounds", _with(Grows), "test_is_bounded"),
    Fault("claims more blocks than were asked for", ClaimsMore, "test_looks_up_what_was_saved"),
    Fault("never finds anything", CountsAll, "test_looks_up_what_was_saved"),
    Fault("has everything saved again", Wants, "test_does_not_want_what_it_has"),
    Fault("fails for unknown blocks", Strict, "test_may_hear_of_unknown_blocks"),
    Fault("can be closed once", ClosesOnce, "test_closes_any_number_of_times"),
]


class TestSound(KVConnectorSuite):
    plugin = Sound
    small_options: ClassVar[Mapping[str, Any]] = {"most": 5}


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_suite_finds_a_connector_that(fault: Fault) -> None:
    check_fault(fault, KVConnectorSuite, plugin=fault.plugin, small_options={"most": 5})
