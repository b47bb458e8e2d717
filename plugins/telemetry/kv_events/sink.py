"""Telemetry sink `kv_events`: what enters and leaves the prefix cache, over ZeroMQ as vLLM publishes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.router import CacheEvent
from dovetail.contracts.telemetry import FollowsCache
from dovetail.plugins.telemetry.kv_events.publisher import Publisher
from dovetail.plugins.telemetry.kv_events.wire import batch_of


class KVEventsOptions(PluginOptions):
    """Options of `kv_events`, with the names and defaults of vLLM's `KVEventsConfig`."""

    endpoint: str = Field(
        default="tcp://*:5557",
        description="Of the PUB socket. It is bound where it has * or :: or is a path (ipc://), else connected to.",
    )
    replay_endpoint: str | None = Field(
        default=None, description="Of the ROUTER socket that sends batches again; bound. None: there is none."
    )
    topic: str = Field(default="", description="First part of each message.")
    buffer_steps: int = Field(default=10_000, ge=0, description="Batches that can be sent again.")
    hwm: int = Field(default=100_000, ge=0, description="ZeroMQ's high-water mark; 0: none.")
    max_queue_size: int = Field(default=100_000, ge=1, description="Batches that wait to be published.")
    data_parallel_rank: int = Field(default=0, ge=0, description="Of this engine, in every batch.")


class KVEventsSink(FollowsCache):
    """Publishes a batch for each step that changed the prefix cache: topic, sequence number (8 bytes, big-endian) and
    payload (msgpack) are the parts of a message."""

    contract: ClassVar[tuple[int, int]] = (1, 4)
    Options: ClassVar[type[PluginOptions]] = KVEventsOptions

    def __init__(self, options: KVEventsOptions):
        super().__init__(options)
        self._rank = options.data_parallel_rank
        self._publisher = Publisher(
            options.endpoint,
            options.replay_endpoint,
            options.topic,
            options.buffer_steps,
            options.hwm,
            options.max_queue_size,
        )

    def on_kv_events(self, events: Sequence[CacheEvent]) -> None:
        """Publishes a batch."""
        self._publisher.publish(batch_of(events, time.time(), self._rank))

    def close(self) -> None:
        """Publishes what waits, and closes the sockets."""
        self._publisher.close()
