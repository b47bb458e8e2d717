"""Blocks of one rank that go to a connector's store and come from it, between steps.

Pages are copied out of the device when they are handed over, and into it when the host says where. Stores work on
threads of their own, with records in host memory: nothing that a store does can reach a page."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dovetail.contracts.device import Device, Event
from dovetail.contracts.kv_connector import BlockStore, StoreSetup
from dovetail.nn.host_copies import on_device
from dovetail.registry.calls import calling
from dovetail.worker.block_records import HEADER_BYTES, RecordSeal
from dovetail.worker.exchange_orders import BlockRow, ExchangeOrders, ExchangeReport
from dovetail.worker.kv_storage import KVStorage
from dovetail.worker.running_worker import RunningWorker

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
"""How long a worker that closes waits for records that are not written yet."""


@dataclass(slots=True)
class _Batch:
    """Pages on their way to the host."""

    hashes: list[bytes]
    pages: torch.Tensor
    """uint8 [blocks, record_bytes] in host memory."""
    done: Event


class BlockExchange:
    """The exchange of one rank."""

    def __init__(
        self,
        device: Device,
        storage: KVStorage,
        store: BlockStore,
        seal: RecordSeal,
        max_queued_bytes: int,
        leaving: Callable[[], Mapping[int, Event]],
    ):
        """`max_queued_bytes`: of records that wait for the store. `leaving`: device blocks that swaps still read."""
        self._device = device
        self._storage = storage
        self._slices = slices_of(storage)
        self._record_bytes = record_bytes(storage)
        self._store = store
        self._seal = seal
        self._max_queued = max_queued_bytes // self._record_bytes
        self._leaving = leaving
        self._lock = threading.Lock()
        self._report = ExchangeReport()
        self._num_unsaved = 0
        self._copying: deque[_Batch] = deque()
        self._records: dict[int, list[memoryview]] = {}
        self._open_loads: set[int] = set()
        self._cancelled: set[int] = set()
        self._to_write: queue.SimpleQueue[tuple[list[bytes], torch.Tensor] | None] = queue.SimpleQueue()
        self._to_read: queue.SimpleQueue[tuple[int, Sequence[bytes], Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._written = threading.Condition(self._lock)
        self._has_warned = False
        self._is_closed = False
        self._threads = [
            threading.Thread(target=target, name=f"dovetail-kv-{name}", daemon=True)
            for name, target in (("writer", self._write_all), ("reader", self._read_all))
        ]
        for thread in self._threads:
            thread.start()

    def exchange(self, orders: ExchangeOrders) -> ExchangeReport:
        """Takes orders and reports. Waits for no store, unless the orders say so."""
        with self._lock:
            self._cancel(orders.cancelled)
        for load_id, rows in orders.places:
            self._place(load_id, rows)
        if orders.saves:
            self._copy_out(orders.saves)
        self._hand_over(waits=orders.waits)
        for load_id, hashes, transfer in orders.loads:
            self._open_loads.add(load_id)
            self._to_read.put((load_id, hashes, transfer))
        if orders.waits:
            with self._written:
                self._written.wait_for(lambda: not self._num_unsaved, CLOSE_S)
        with self._lock:
            report, self._report = self._report, ExchangeReport()
            report.num_open = self._num_unsaved + len(self._open_loads)
        report.num_copying = len(self._copying)
        return report

    def close(self) -> None:
        """Writes what was handed over, as far as that takes less than `CLOSE_S`, and closes the store. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._hand_over(waits=True)
        with self._lock:
            self._cancelled |= self._open_loads
        self._to_write.put(None)
        self._to_read.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)
        self._store.close()

    def _cancel(self, load_ids: Sequence[int]) -> None:
        for load_id in load_ids:
            self._records.pop(load_id, None)
            if load_id in self._open_loads:
                self._cancelled.add(load_id)

    def _copy_out(self, saves: Sequence[tuple[bytes, BlockRow]]) -> None:
        with self._lock:
            budget = max(0, self._max_queued - self._num_unsaved)
            self._report.num_dropped += max(0, len(saves) - budget)
            self._report.refused += [block_hash for block_hash, _ in saves[budget:]]
            saves = saves[:budget]
            self._num_unsaved += len(saves)
        if not saves:
            return
        pages = self._device.host_buffer(len(saves), self._record_bytes, dtype=torch.uint8)
        ids = np.array([row for _, row in saves], dtype=np.int64)
        self._device.launch(partial(self._gather, ids, pages))
        self._copying.append(_Batch([block_hash for block_hash, _ in saves], pages, self._device.record()))

    @torch.inference_mode()
    def _gather(self, ids: np.ndarray[Any, np.dtype[np.int64]], pages: torch.Tensor) -> None:
        blocks = on_device(ids.T, self._storage.device)
        for group, tensor, start, end in self._slices:
            pages[:, start:end].copy_(tensor[blocks[group]], non_blocking=True)

    def _hand_over(self, *, waits: bool) -> None:
        """To the writer, what has reached the host."""
        while self._copying and (waits or self._copying[0].done.is_done()):
            batch = self._copying.popleft()
            batch.done.wait()
            self._to_write.put((batch.hashes, batch.pages))

    def _place(self, load_id: int, rows: Sequence[BlockRow]) -> None:
        records = self._records.pop(load_id)
        if not rows:
            return
        pages = self._device.host_buffer(len(rows), self._record_bytes, dtype=torch.uint8)
        host = pages.numpy()
        for index, record in enumerate(records[: len(rows)]):
            host[index] = np.frombuffer(record, dtype=np.uint8)
        ids = np.array(rows, dtype=np.int64)
        leaving = self._leaving()
        after = {event for block in ids.ravel().tolist() if (event := leaving.get(block)) is not None}
        self._device.launch(partial(self._scatter, ids, pages), after=list(after))

    @torch.inference_mode()
    def _scatter(self, ids: np.ndarray[Any, np.dtype[np.int64]], pages: torch.Tensor) -> None:
        blocks = on_device(ids.T, self._storage.device)
        arrived = pages.to(self._storage.device, non_blocking=True)
        for group, tensor, start, end in self._slices:
            tensor[blocks[group]] = arrived[:, start:end]

    def _write_all(self) -> None:
        # A function for each batch: none of its names keeps the pages while the next batch is waited for.
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        batch = self._to_write.get()
        if batch is None:
            return False
        hashes, pages = batch
        rows = pages.numpy()
        for index, block_hash in enumerate(hashes):
            self._write(block_hash, memoryview(rows[index]))
        return True

    def _write(self, block_hash: bytes, record: memoryview) -> None:
        try:
            self._seal.put(block_hash, record)
            removed = [bytes(one) for one in self._store.write(block_hash, record.toreadonly())]
        except Exception as error:
            # The error has no other name: one would keep this frame, and so the record, until garbage is collected.
            with self._written:
                self._note_failure("write", error)
                self._report.refused.append(block_hash)
                self._note_done()
            return
        with self._written:
            self._report.removed += removed
            if block_hash not in removed:
                self._report.saved.append(block_hash)
            self._note_done()

    def _note_done(self) -> None:
        self._num_unsaved -= 1
        self._written.notify_all()

    def _read_all(self) -> None:
        while self._read_next():
            pass

    def _read_next(self) -> bool:
        load = self._to_read.get()
        if load is None:
            return False
        load_id, hashes, transfer = load
        records: list[memoryview] = []
        for block_hash in hashes:
            record = None if load_id in self._cancelled else self._read(block_hash, transfer)
            if record is None:
                break
            records.append(record)
        with self._lock:
            self._open_loads.discard(load_id)
            if load_id in self._cancelled:
                self._cancelled.remove(load_id)
                records = []
            else:
                self._records[load_id] = records
            self._report.loaded[load_id] = len(records)
        return True

    def _read(self, block_hash: bytes, transfer: Mapping[str, Any]) -> memoryview | None:
        """The record, verified."""
        try:
            found = self._store.read(block_hash, transfer)
            if found is None:
                return None
            record = memoryview(found).cast("B")
            if self._seal.is_whole(block_hash, record):
                return record
            with self._lock:
                self._report.num_corrupt += 1
                self._report.removed.append(block_hash)
            self._store.remove(block_hash)
        except Exception as error:
            with self._lock:
                self._note_failure("read", error)
        return None

    def _note_failure(self, call: str, error: Exception) -> None:
        self._report.num_failed += 1
        if not self._has_warned:
            self._has_warned = True
            # The traceback of an OSError says nothing of what ails a disk or a network; another error may be a mistake.
            logger.warning(
                "KV connector: %s.%s failed (%s: %s), and the block is computed instead or not saved; further failures"
                " are only counted",
                type(self._store).__name__,
                call,
                type(error).__name__,
                error,
                exc_info=None if isinstance(error, OSError) else error,
            )


def slices_of(storage: KVStorage) -> list[tuple[int, torch.Tensor, int, int]]:
    """What a record holds: KV group, tensor uint8 [blocks, page_bytes], and where the page is in the record."""
    layout = storage.layout
    shared, extra = storage.tensors[: layout.num_tensors], storage.tensors[layout.num_tensors :]
    owners = [one.group_id for one in layout.extra_tensors for _ in one.page_bytes]
    slices: list[tuple[int, torch.Tensor, int, int]] = []
    start = HEADER_BYTES
    for group in layout.groups:
        own = [tensor for tensor, owner in zip(extra, owners, strict=False) if owner == group.group_id]
        for tensor in (*shared[: len(group.layer_ids)], *own):
            slices.append((group.group_id, tensor, start, start + tensor.shape[1]))
            start += tensor.shape[1]
    return slices


def record_bytes(storage: KVStorage) -> int:
    """Length of every record of this rank."""
    return slices_of(storage)[-1][3]


def open_exchange(running: RunningWorker, namespace: bytes, max_queued_bytes: int) -> BlockExchange:
    """The exchange of a worker with the connector of its config. Raises `PluginError` where its store cannot be opened,
    `ConfigError` as the store does."""
    setup, storage = running.loaded.setup, running.storage
    connector, rank, num_bytes = setup.config.kv_connector, setup.placement.rank, record_bytes(storage)
    assert connector is not None
    plugin, options = setup.plugins.get(connector.component)
    with calling(f"kv_connector {connector.component.name!r}", "open_store"):
        store = plugin.open_store(
            options,
            StoreSetup(namespace=namespace, rank=rank, num_ranks=setup.config.num_ranks, record_bytes=num_bytes),
        )
    seal = RecordSeal(namespace, rank, num_bytes)
    return BlockExchange(setup.device, storage, store, seal, max_queued_bytes, lambda: running.runner.leaving)
