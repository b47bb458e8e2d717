"""The trainer's end of the weight transport `collective`: new weights for engines on any machines, by broadcast."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping
from datetime import timedelta
from hashlib import blake2b
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from dovetail.contracts.errors import ModelError
from dovetail.rl.buckets import Named, buckets_of, described, num_bytes

PREFIX = "dovetail.weights"
BUCKET_BYTES = 256 << 20


class CollectiveSender:
    """Rank 0 of a process group of gloo whose other ranks are the workers of one or more engines. It is a group of its
    own, beside torch's default group. The trainer's process has it; one thread uses it::

        sender = CollectiveSender("10.0.0.1", world_size=3)
        post(sender.init_info())  # llm.init_weight_transfer_engine(init_info), which waits for connect
        sender.connect()  # llm.start_weight_update()
        for update_info in sender.send(model.state_dict().items()):
            post(update_info)  # llm.update_weights(update_info)
        ...  # llm.finish_weight_update()

    A group in which a broadcast failed, or was not received by all, is of no more use: take another sender.
    """

    def __init__(self, master_address: str, master_port: int = 0, *, world_size: int, timeout_s: float = 60.0):
        """Listens at `master_address`, an address of this machine, and returns. `master_port`: 0 for one that is free.
        `world_size`: all workers, and 1. `timeout_s`: how long each step waits for workers. Raises `ModelError` where
        it cannot listen."""
        if world_size < 2 or not timeout_s > 0:
            raise ValueError(f"world_size is {world_size} and timeout_s {timeout_s}; they are at least 2, and above 0")
        self._address, self._world_size = master_address, world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._group: ProcessGroupGloo | None = None
        self._is_broken = False
        try:
            self._store = TCPStore(master_address, master_port, world_size, True, self._timeout, wait_for_workers=False)
        except RuntimeError as error:
            raise ModelError(f"cannot listen at {master_address}:{master_port}: {error}") from error

    def init_info(self, rank_offset: int = 1) -> Mapping[str, Any]:
        """For `init_weight_transfer_engine`. `rank_offset`: the rank of that engine's first worker; with several
        engines, 1 and the workers of those before."""
        return {
            "master_address": self._address,
            "master_port": self._store.port,
            "rank_offset": rank_offset,
            "world_size": self._world_size,
        }

    def connect(self) -> None:
        """Returns once all workers are there. Raises `ModelError` where they do not come within `timeout_s`."""
        try:
            self._group = ProcessGroupGloo(PrefixStore(PREFIX, self._store), 0, self._world_size, self._timeout)
        except RuntimeError as error:
            raise ModelError(f"not all of {self._world_size - 1} workers connected: {error}") from error

    def send(self, weights: Iterable[Named], bucket_bytes: int = BUCKET_BYTES) -> Generator[Mapping[str, Any]]:
        """Yields one `update_info` per bucket, for `update_weights` of all engines; JSON can hold it. To ask for the
        next waits until this one is sent.

        `weights`: pairs of the checkpoint's name and a tensor of any floating dtype, on any device; tensors of a GPU
        are copied to host memory. They may change once their bucket was yielded. `bucket_bytes`: most bytes of tensors
        in one broadcast; a larger tensor gets one of its own.

        Raises `ModelError` where there is no connection, a worker is gone, or a bucket is not received within
        `timeout_s`."""
        if self._group is None or self._is_broken:
            raise ModelError("no workers are connected, or a broadcast failed: connect with a new CollectiveSender")
        # Until all broadcasts are done: whoever stops in between leaves workers behind.
        self._is_broken = True
        for bucket in buckets_of(weights, bucket_bytes):
            update_info = described(bucket)
            content = _content(bucket)
            # Workers compare the digest with what they were announced, before they receive tensors of any size.
            announced = blake2b(json.dumps(update_info, sort_keys=True).encode(), digest_size=16).digest()
            header = torch.frombuffer(bytearray(announced), dtype=torch.uint8)
            try:
                # torch's stubs lack the method.
                works = [
                    self._group.broadcast(header, 0),  # type: ignore[attr-defined]
                    self._group.broadcast(content, 0),  # type: ignore[attr-defined]
                ]
                yield update_info
                for work in works:
                    work.wait(self._timeout)
            except RuntimeError as error:
                raise ModelError(f"a bucket did not reach all workers: {error}") from error
        self._is_broken = False

    def close(self) -> None:
        """Ends the group. Idempotent."""
        self._group = None
        self._is_broken = True


def _content(bucket: Iterable[Named]) -> torch.Tensor:
    """The bytes of all tensors, one behind the other."""
    content = torch.empty(sum(num_bytes(tensor) for _, tensor in bucket), dtype=torch.uint8)
    begin = 0
    for _, tensor in bucket:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        content[begin : begin + raw.numel()] = raw
        begin += raw.numel()
    return content
