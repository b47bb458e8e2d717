"""The trainer's end of the weight transport `ipc`: new weights for an engine on the same machine."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import zmq

from dovetail.contracts.errors import ModelError
from dovetail.rl.buckets import Named, buckets_of, described, num_bytes

ALIGNMENT = 64
BUCKET_BYTES = 256 << 20

if sys.platform == "linux":
    from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, fcntl


class WeightSender:
    """Sends weights to the workers of one engine, in shared memory. The trainer's process has it; one thread uses it::

        with WeightSender(num_ranks=2) as sender:
            post(sender.init_info())  # llm.init_weight_transfer_engine(init_info), llm.start_weight_update()
            for update_info in sender.send(model.state_dict().items()):
                post(update_info)  # llm.update_weights(update_info)
            ...  # llm.finish_weight_update()

    Segments have no names (`memfd_create`): nothing stays in /dev/shm, whoever is killed. Workers open them through
    /proc, so they run as the same user and see the trainer's process id. Linux only.
    """

    def __init__(self, num_ranks: int = 1, *, timeout_s: float = 60.0):
        """`num_ranks`: the engine's workers. `timeout_s`: how long `send` waits for them to connect, and to map each
        bucket. Raises `ModelError` where there is no such memory."""
        if sys.platform != "linux":
            raise ModelError("ipc needs Linux: choose the weight_transport disk or in_process")
        if num_ranks < 1 or not timeout_s > 0:
            raise ValueError(f"num_ranks is {num_ranks} and timeout_s {timeout_s}; both are above 0")
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._connection = 0
        self._bucket = 0
        self._ranks: dict[int, bytes] = {}
        self._mapped: set[int] = set()
        self._folder = tempfile.mkdtemp(prefix="dovetail-weights-")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._address = f"ipc://{Path(self._folder, 'socket')}"
            self._socket.bind(self._address)
        except BaseException:
            self.close()
            raise

    def init_info(self) -> Mapping[str, Any]:
        """For `init_weight_transfer_engine`. An engine that connects again needs a new one: workers of earlier ones are
        forgotten."""
        self._connection += 1
        self._ranks.clear()
        return {
            "address": self._address,
            "pid": os.getpid(),
            "num_ranks": self._num_ranks,
            "connection": self._connection,
        }

    def send(self, weights: Iterable[Named], bucket_bytes: int = BUCKET_BYTES) -> Generator[Mapping[str, Any]]:
        """Yields one `update_info` per bucket, for `update_weights`; JSON can hold it. To ask for the next waits until
        all workers have mapped this one.

        `weights`: pairs of the checkpoint's name and a tensor of any floating dtype, on any device; tensors of a GPU
        are copied to host memory. They may change once their bucket was yielded. `bucket_bytes`: most bytes of tensors
        in one segment; a larger tensor gets one of its own.

        Raises `ModelError` where workers do not connect, or do not map a bucket, within `timeout_s`."""
        for bucket in buckets_of(weights, bucket_bytes):
            self._bucket += 1
            self._mapped.clear()
            name = f"dovetail-weights-{self._bucket}"
            offsets, size = _layout(bucket)
            segment = _filled_segment(name, bucket, offsets, size)
            try:
                self._offer({"bucket": self._bucket, "fd": segment, "segment": name, "size": size, "offsets": offsets})
                yield {**described(bucket), "bucket": self._bucket}
                del bucket
                self._wait(lambda: len(self._mapped) == self._num_ranks, "have read the last bucket", self._mapped)
            finally:
                os.close(segment)

    def close(self) -> None:
        """Ends the connection. Idempotent."""
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _offer(self, handle: Mapping[str, Any]) -> None:
        self._wait(lambda: len(self._ranks) == self._num_ranks, "are connected", self._ranks)
        for rank, identity in self._ranks.items():
            try:
                self._socket.send_multipart([identity, json.dumps(handle).encode()])
            except zmq.ZMQError as error:
                raise ModelError(
                    f"worker {rank} is gone: send init_info() to the engine's init_weight_transfer_engine again"
                ) from error

    def _wait(self, is_done: Callable[[], bool], what: str, done: Iterable[int]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while self._socket.poll(0):
            self._hear()
        while not is_done():
            if not self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                raise ModelError(
                    f"after {self._timeout_s:g} s, of {self._num_ranks} workers only {sorted(done)} {what}: see what"
                    " the engine raised, and whether num_ranks is its number of workers"
                )
            self._hear()

    def _hear(self) -> None:
        identity, body = self._socket.recv_multipart()
        message = json.loads(body)
        if message["connection"] != self._connection:
            return
        if "mapped" not in message:
            self._ranks[message["rank"]] = identity
        elif message["mapped"] == self._bucket:
            self._mapped.add(message["rank"])


def _layout(bucket: Iterable[Named]) -> tuple[list[int], int]:
    """Where each tensor begins, and the size of the segment, in bytes."""
    offsets: list[int] = []
    size = 0
    for _, tensor in bucket:
        offsets.append(size)
        size += -(-num_bytes(tensor) // ALIGNMENT) * ALIGNMENT
    return offsets, max(size, ALIGNMENT)


def _filled_segment(name: str, bucket: Iterable[Named], offsets: Iterable[int], size: int) -> int:
    """The descriptor of a segment of `size` bytes that holds the bucket. Its size is sealed, so that readers cannot
    meet a missing page."""
    segment = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(segment, size)
        fcntl(segment, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        memory = torch.frombuffer(mmap.mmap(segment, size), dtype=torch.uint8)
        for offset, (_, tensor) in zip(offsets, bucket, strict=True):
            raw = memory[offset : offset + num_bytes(tensor)]
            raw.view(tensor.dtype).reshape(tensor.shape).copy_(tensor.detach())
    except BaseException:
        os.close(segment)
        raise
    return segment
