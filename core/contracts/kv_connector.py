"""KV connector: where full blocks of the KV cache are kept besides the device, so that a later request, a later process
or another engine need not compute them again.

A connector has two parts. The host creates

    a `KVConnector` in the engine's process      it knows which blocks there are: lookup, wants, saved, removed
    a `BlockStore` on every rank                 it moves bytes: write, read, remove

A block is named by its hash (32 bytes), which covers its tokens and all before them, the adapter and the salt, within
a `namespace` (32 bytes): a digest of all else that the pages' numbers follow from, which are weights and their version,
the model's config, dtypes, block size, layout, sharding, plugins and their options. Two engines may exchange a block
exactly where hash and namespace are equal. When the weights change, the host closes connector and stores and creates
new ones.

The bytes of one block on one rank are a **record**: opaque to a store, and of one length (`StoreSetup.record_bytes`).
Stores never see device memory. The host copies pages out of the device before it hands a record over, and verifies the
length and a checksum, which covers hash, namespace and rank, before it copies what a store returned into a page that
nobody else holds. So a store that returns other bytes, another block's bytes or a torn record costs a computation and
gives no wrong token. Blocks are saved and loaded between steps, never within one.

A request whose prompt a connector seems to have waits while its blocks are loaded, at most `load_seconds` of the config
section. What could not be loaded is computed.

Content that is missing is an answer, and no reason to raise. What a store raises is counted, the first time logged, and
the blocks concerned are computed or not saved. A `KVConnector` that raises is switched off: the engine goes on without
it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.contracts.plugin import Plugin, PluginOptions

TRANSFER_PARAMS = "kv_transfer_params"
"""Key of `SamplingParams.extra` whose value connectors get as `transfer`."""


@dataclass(frozen=True, kw_only=True)
class ConnectorSetup:
    """What a connector is created with, in the engine's process."""

    namespace: bytes
    """32 bytes: digest of all that the pages' numbers follow from but tokens."""
    num_ranks: int
    """Workers that keep a part of every block."""
    block_size: int
    """Tokens per block."""


@dataclass(frozen=True, kw_only=True)
class StoreSetup:
    """What a store is opened with, on one rank."""

    namespace: bytes
    """As `ConnectorSetup.namespace`."""
    rank: int
    num_ranks: int
    record_bytes: int
    """Length of every record of this rank."""


class BlockStore(ABC):
    """The records of one rank and one namespace.

    The host calls `write` and `remove` from one thread and `read` from another, at the same time; neither is the thread
    that runs steps, so they may wait. `close` comes last, from a third, and may come while one of the others hangs.
    """

    @abstractmethod
    def write(self, block_hash: bytes, record: memoryview) -> Sequence[bytes]:
        """Keeps a record; one that is there already may stay. `record` is valid during the call.

        Returns hashes of blocks that were removed to make way, which may be `block_hash` itself. Raises `OSError`, or
        anything else, where the record is not kept.
        """

    @abstractmethod
    def read(self, block_hash: bytes, transfer: Mapping[str, Any]) -> bytes | bytearray | memoryview | None:
        """Returns the record, or None where it is not there. Nobody changes what was returned.

        `transfer`: the request's `kv_transfer_params`; empty for most.
        """

    @abstractmethod
    def remove(self, block_hash: bytes) -> None:
        """Forgets a record: what `read` returned for it was not what `write` was given. It may be gone already."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what the store holds. What is meant to survive the process survives. Idempotent."""


class KVConnector(Plugin):
    """Knows which blocks the stores of all ranks have. One instance per engine and namespace; the engine's thread calls
    it between steps, so that every call must return at once: no network, no reading of files (asking whether a file
    exists is fine)."""

    def __init__(self, options: PluginOptions, setup: ConnectorSetup):
        self.options = options
        self.setup = setup

    @classmethod
    @abstractmethod
    def open_store(cls, options: Any, setup: StoreSetup) -> BlockStore:
        """Opens the store of one rank, in that rank's process. `options` is an instance of `cls.Options`. Raises
        `ConfigError` for options that cannot work on this machine."""

    @classmethod
    def transfer_params(cls, options: Any) -> Mapping[str, Any]:
        """Returns the `kv_transfer_params` by which requests in another engine find what this engine computed: plain
        data, vLLM's names and keys of its own with a dot in them (`acme.slot`). Empty: no other engine is sent here.
        `options` is an instance of `cls.Options`."""
        return {}

    @abstractmethod
    def lookup(self, block_hashes: Sequence[bytes], transfer: Mapping[str, Any]) -> int:
        """Returns how many of the first of `block_hashes`, which follow each other in a prompt, all ranks seem to have.

        A hint: what is not there after all is computed. Hoping where nobody can know costs the request the time of a
        `read`. `transfer`: the request's `kv_transfer_params` (`SamplingParams.extra`); empty for most.
        """

    @abstractmethod
    def wants(self, block_hash: bytes) -> bool:
        """Whether a block that was computed is to be saved: not where it is there already, nor where this connector
        only loads."""

    @abstractmethod
    def saved(self, block_hashes: Sequence[bytes]) -> None:
        """All ranks have written these."""

    @abstractmethod
    def removed(self, block_hashes: Sequence[bytes]) -> None:
        """Some rank has these no longer; the connector may never have heard of some of them."""

    @abstractmethod
    def close(self) -> None:
        """The engine shuts down, or its weights changed. Idempotent."""
