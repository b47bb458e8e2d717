"""Blocks that another engine computed, fetched over a socket: prefill in one engine, decode in another."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.kv_connector import BlockStore, ConnectorSetup, KVConnector, StoreSetup
from dovetail.contracts.plugin import PluginOptions
from dovetail.plugins.kv_connectors.peer_socket import PeerConnection, RecordServer
from dovetail.plugins.kv_connectors.recent_records import RecentRecords
from dovetail.plugins.kv_connectors.sizes import most_bytes

logger = logging.getLogger(__name__)

ANY_PEER = "*"
_EVERYWHERE = ("", "0.0.0.0", "::")
_PEER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+):([1-9][0-9]{0,4})")


class PeerOptions(PluginOptions):
    """What a config may say besides the name."""

    role: Literal["producer", "consumer", "both"] = "both"
    """producer: what is computed here can be fetched; consumer: blocks are fetched from peers; or both."""
    host: str = "127.0.0.1"
    """Address at which a producer listens. Whoever reaches it can read blocks: keep it within a trusted network."""
    announced_host: str | None = None
    """Address by which consumers reach `host`, where that is another; responses name it. null: `host`."""
    port: int = Field(default=7150, ge=1, le=65000)
    """Port of a producer's first rank; rank r listens at port + r."""
    size_gib: float = Field(default=4.0, gt=0)
    """Host memory of a producer for blocks that may be fetched, over all ranks, in GiB."""
    peers: tuple[str, ...] = ()
    """Producers that requests may name (`kv_transfer_params`), each as HOST:PORT, an IPv6 address as [::1]:7150; "*":
    any. A consumer needs one."""
    timeout_seconds: float = Field(default=5.0, gt=0)
    """How long a consumer waits for a connection, and for the bytes of a block."""
    wait_seconds: float = Field(default=1.0, ge=0)
    """How long a producer waits for a block that is asked for and not there yet."""
    retry_seconds: float = Field(default=5.0, ge=0)
    """How long a peer that failed is not asked."""

    @field_validator("peers")
    @classmethod
    def _names_ports(cls, peers: tuple[str, ...]) -> tuple[str, ...]:
        """What no request can name would never be fetched from."""
        for peer in peers:
            found = _PEER.fullmatch(peer)
            if peer != ANY_PEER and (found is None or int(found[2]) > 65535):
                raise ValueError(
                    f"{peer!r} names no peer: write HOST:PORT, as 10.0.0.5:7150 or [::1]:7150, with the port of the"
                    ' producer\'s first rank and no scheme, or "*" for any'
                )
        return peers

    @property
    def produces(self) -> bool:
        """Whether blocks can be fetched from here."""
        return self.role != "consumer"

    @property
    def consumes(self) -> bool:
        """Whether blocks are fetched."""
        return self.role != "producer"


def peer_of(transfer: Mapping[str, Any]) -> tuple[str, int] | None:
    """Whose blocks a request wants: `remote_host` and `remote_port` of its `kv_transfer_params`."""
    host, port = transfer.get("remote_host"), transfer.get("remote_port")
    return (host, port) if isinstance(host, str) and isinstance(port, int) and 0 < port < 65536 else None


def name_of(peer: tuple[str, int]) -> str:
    """As `PeerOptions.peers` has it."""
    host, port = peer
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class PeerStore(BlockStore):
    """One rank's side of both roles."""

    def __init__(self, options: PeerOptions, setup: StoreSetup):
        self._options = options
        self._setup = setup
        self._records = RecentRecords(most_bytes(options.size_gib, setup) if options.produces else 0)
        self._server = _serve(options, setup, self._records) if options.produces else None
        self._connections: dict[tuple[str, int], PeerConnection] = {}
        self._not_before: dict[tuple[str, int], float] = {}

    def write(self, block_hash: bytes, record: memoryview) -> Sequence[bytes]:
        return self._records.put(block_hash, record)

    def read(self, block_hash: bytes, transfer: Mapping[str, Any]) -> bytearray | None:
        peer = peer_of(transfer)
        if peer is None or time.monotonic() < self._not_before.get(peer, 0.0):
            return None
        try:
            return self._fetch(peer, block_hash)
        except OSError as error:
            self._drop(peer)
            self._not_before[peer] = time.monotonic() + self._options.retry_seconds
            raise OSError(f"peer {name_of(peer)}, rank {self._setup.rank}: {error}") from error

    def _fetch(self, peer: tuple[str, int], block_hash: bytes) -> bytearray | None:
        if peer in self._connections:
            try:
                return self._ask(peer, block_hash)
            except ConnectionError:  # closed since it was used: the peer may have started again
                self._drop(peer)
        address = peer[0], peer[1] + self._setup.rank
        self._connections[peer] = PeerConnection(address, self._options.timeout_seconds)
        return self._ask(peer, block_hash)

    def _ask(self, peer: tuple[str, int], block_hash: bytes) -> bytearray | None:
        return self._connections[peer].fetch(self._setup.namespace, block_hash, self._setup.record_bytes)

    def _drop(self, peer: tuple[str, int]) -> None:
        if (broken := self._connections.pop(peer, None)) is not None:
            broken.close()

    def remove(self, block_hash: bytes) -> None:
        self._records.remove(block_hash)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._records.clear()


def _serve(options: PeerOptions, setup: StoreSetup, records: RecentRecords) -> RecordServer:
    port = options.port + setup.rank
    try:
        return RecordServer((options.host, port), setup.namespace, records, options.wait_seconds)
    except OSError as error:
        raise ConfigError(
            f"kv_connector.port: rank {setup.rank} cannot listen at {options.host}:{port} ({error}): choose another"
            " kv_connector.port, or role consumer where nobody fetches from this engine"
        ) from error


class Peer(KVConnector):
    """Host memory of this engine that others read, and theirs that this one reads."""

    contract: ClassVar[tuple[int, int]] = (1, 1)
    Options = PeerOptions
    options: PeerOptions

    def __init__(self, options: PluginOptions, setup: ConnectorSetup):
        super().__init__(options, setup)
        self._known: set[bytes] = set()
        self._refused: set[tuple[str, int]] = set()

    @classmethod
    def check(cls, need: Any, options: PeerOptions, environment: Any) -> list[str]:
        if options.role == "consumer" and not options.peers:
            return ['a consumer fetches from peers that it may name: set peers to their HOST:PORT, or to ["*"]']
        if options.produces and options.announced_host is None and options.host in _EVERYWHERE:
            return [
                f"host {options.host!r} is no address that a response could name: set announced_host to the one by"
                " which consumers reach this machine"
            ]
        return []

    @classmethod
    def transfer_params(cls, options: PeerOptions) -> Mapping[str, Any]:
        if not options.produces:
            return {}
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": options.announced_host or options.host,
            "remote_port": options.port,
        }

    @classmethod
    def open_store(cls, options: PeerOptions, setup: StoreSetup) -> BlockStore:
        return PeerStore(options, setup)

    def lookup(self, block_hashes: Sequence[bytes], transfer: Mapping[str, Any]) -> int:
        peer = peer_of(transfer)
        if not self.options.consumes or peer is None or not self._may_ask(peer):
            return 0
        return len(block_hashes)  # what the peer has, asking for it tells

    def wants(self, block_hash: bytes) -> bool:
        return self.options.produces and block_hash not in self._known

    def saved(self, block_hashes: Sequence[bytes]) -> None:
        self._known.update(block_hashes)

    def removed(self, block_hashes: Sequence[bytes]) -> None:
        self._known.difference_update(block_hashes)

    def close(self) -> None:
        self._known.clear()

    def _may_ask(self, peer: tuple[str, int]) -> bool:
        """Whether the config allows it: a request must not make the engine connect to anywhere."""
        name = name_of(peer)
        if name in self.options.peers or ANY_PEER in self.options.peers:
            return True
        if peer not in self._refused and len(self._refused) < 100:
            self._refused.add(peer)
            logger.warning("blocks are not fetched from %s, which kv_connector.peers does not name", name)
        return False
