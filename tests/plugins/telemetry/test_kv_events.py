"""The `kv_events` sink, read as vLLM's subscribers read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from dovetail.contracts.errors import ConfigError
from dovetail.contracts.router import AllBlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from dovetail.plugins.telemetry.kv_events.sink import KVEventsOptions, KVEventsSink
from dovetail.plugins.telemetry.kv_events.wire import batch_of
from dovetail.testing.telemetry_suite import TelemetrySinkSuite
from dovetail.vllm.kv_events import vllm_batch

STORED = BlocksStored(block_hashes=(b"b",), parent_hash=b"a", token_ids=(1, 2), block_size=2, adapter="lora")
HASHES = st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """As vLLM publishes it, without the fields that it adds for its own use."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class Cleared(msgspec.Struct, omit_defaults=True, tag="AllBlocksCleared"):
    pass


class KVEventBatch(msgspec.Struct, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | Cleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(KVEventBatch).decode


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(20_000), "nothing came"
    return socket.recv_multipart()


def test_a_subscriber_of_vllm_reads_batches_and_gets_missed_ones_again(tmp_path: Path) -> None:
    options = KVEventsOptions(
        endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay", topic="kv", buffer_steps=2
    )
    sink, context = KVEventsSink(options), zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.subscribe("kv")
    subscriber.connect(options.endpoint)
    number = 0
    while not subscriber.poll(20):  # until the subscription has arrived
        sink.on_kv_events([AllBlocksCleared()])
        number += 1
    first = int.from_bytes(receive(subscriber)[1], "big")
    sink.on_kv_events([STORED, BlocksRemoved(block_hashes=(b"c", b"d"))])
    for expected in range(first + 1, number):
        assert int.from_bytes(receive(subscriber)[1], "big") == expected
    topic, last, payload = receive(subscriber)
    batch = decode(payload)
    assert (topic, int.from_bytes(last, "big"), batch.data_parallel_rank) == (b"kv", number, 0)
    assert batch.events == [
        BlockStored([b"b"], b"a", [1, 2], 2, None, "GPU", "lora"),
        BlockRemoved([b"c", b"d"], "GPU"),
    ]
    # As vLLM's subscribers ask: one question, many answers.
    dealer = context.socket(zmq.DEALER)
    dealer.connect(str(options.replay_endpoint))
    dealer.send_multipart([b"", last])
    assert receive(dealer) == [b"", last, payload]
    assert receive(dealer) == [b"", (-1).to_bytes(8, "big", signed=True), b""]
    sink.close()
    context.destroy(linger=0)


EVENTS = st.lists(
    st.builds(
        lambda hashes, parent, adapter: BlocksStored(
            block_hashes=hashes, parent_hash=parent, token_ids=(7,) * len(hashes), block_size=1, adapter=adapter
        ),
        HASHES,
        st.none() | st.binary(min_size=1, max_size=4),
        st.none() | st.text(max_size=3),
    )
    | st.builds(lambda hashes: BlocksRemoved(block_hashes=hashes), HASHES)
    | st.just(AllBlocksCleared())
)


@given(EVENTS)
def test_what_is_published_is_the_schema_of_vllm_names(events: Sequence[CacheEvent]) -> None:
    payload = msgspec.msgpack.encode(batch_of(events, 5.0, 1))
    assert msgspec.msgpack.decode(payload) == vllm_batch(events, 5.0, 1)
    assert len(decode(payload).events) == len(events)


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot use endpoint 'no://where'"):
        KVEventsSink(KVEventsOptions(endpoint="no://where"))


class TestKVEventsSink(TelemetrySinkSuite):
    plugin = KVEventsSink

    @pytest.fixture
    def options(self, tmp_path: Path) -> dict[str, str]:
        return {"endpoint": f"ipc://{tmp_path}/events"}
