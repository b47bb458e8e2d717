"""Blocks of another engine, which may start again."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from dovetail.contracts.kv_connector import BlockStore, ConnectorSetup, StoreSetup
from dovetail.plugins.kv_connectors.peer import Peer, PeerOptions
from tests.ports import free_ports

HASH = bytes(32)
SETUP = StoreSetup(namespace=bytes(32), rank=0, num_ranks=1, record_bytes=4)


def _producer(host: str, port: int, record: bytes) -> BlockStore:
    store = Peer.open_store(PeerOptions(role="producer", host=host, port=port, wait_seconds=0), SETUP)
    store.write(HASH, memoryview(record))
    return store


def test_a_producer_that_started_again_has_not_failed() -> None:
    """The connection to the one before is closed; one that nobody answers is a failure that names the peer."""
    port = free_ports()
    transfer = {"remote_host": "127.0.0.1", "remote_port": port}
    consumer = Peer.open_store(PeerOptions(role="consumer", peers=("*",)), SETUP)
    for record in (b"1st.", b"2nd."):
        producer = _producer("127.0.0.1", port, record)
        assert consumer.read(HASH, transfer) == record
        producer.close()
    with pytest.raises(OSError, match=rf"peer 127\.0\.0\.1:{port}, rank 0: .*refused"):
        consumer.read(HASH, transfer)
    assert consumer.read(HASH, transfer) is None
    consumer.close()


def test_a_peer_may_have_an_address_of_ipv6() -> None:
    try:
        port = free_ports(host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    options = PeerOptions(host="::1", port=port, peers=(f"[::1]:{port}",), wait_seconds=0)
    producer = _producer("::1", port, b"1st.")
    transfer = Peer.transfer_params(options)
    consumer = Peer.open_store(PeerOptions(role="consumer", peers=options.peers), SETUP)
    assert Peer(options, ConnectorSetup(namespace=bytes(32), num_ranks=1, block_size=4)).lookup([HASH], transfer) == 1
    assert consumer.read(HASH, transfer) == b"1st."
    consumer.close()
    producer.close()


@pytest.mark.parametrize(
    "peer", ["10.0.0.5", "http://127.0.0.1:7150/", "::1:7150", "host:0", "host:70000", "host:07150"]
)
def test_peers_that_no_request_can_name_are_refused(peer: str) -> None:
    with pytest.raises(ValidationError, match=r"names no peer: write HOST:PORT"):
        PeerOptions(role="consumer", peers=("*", "prefill-1.local:7150", peer))
