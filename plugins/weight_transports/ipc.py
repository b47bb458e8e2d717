"""The `ipc` transport: a trainer in another process of this machine hands over tensors in shared memory."""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import zmq
from pydantic import Field, ValidationError

from dovetail.contracts.errors import ModelError, RequestError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.weight_transport import TransportSetup, WeightTransport, WeightTransportCapabilities
from dovetail.contracts.weights import WeightReader
from dovetail.plugins.weight_transports.announced import Announced, Given, parsed
from dovetail.plugins.weight_transports.tensors import TensorsReader

SCHEME = "ipc://"

if sys.platform == "linux":
    from fcntl import F_GET_SEALS, F_SEAL_SHRINK, fcntl


class IpcOptions(PluginOptions):
    """Options of `ipc`."""

    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long the sender may stay silent before a bucket is given up, in seconds."""


class IpcInit(Given):
    """`WeightSender.init_info()`."""

    address: str
    pid: Annotated[int, Field(gt=0)]
    num_ranks: int
    connection: int


class IpcUpdate(Announced):
    """What `WeightSender.send` yields."""

    bucket: int


class Handle(Given):
    """What the sender says to each worker about a bucket: where its segment is."""

    bucket: int
    fd: Annotated[int, Field(ge=0)]
    segment: str
    size: Annotated[int, Field(gt=0)]
    offsets: list[Annotated[int, Field(ge=0)]]


class IpcTransport(WeightTransport):
    """`dovetail.rl.weight_sender.WeightSender` gives `init_info` and `update_info`.

    Handles come through ZeroMQ, tensors through segments without names, which workers open through /proc: those of a
    trainer that is gone are gone too. Linux; one user, one machine, one namespace of process ids.
    """

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = WeightTransportCapabilities(device_types=None, tensor_parallel=None)

    Options: ClassVar[type[PluginOptions]] = IpcOptions
    options: IpcOptions

    def __init__(self, options: IpcOptions, setup: TransportSetup):
        super().__init__(options, setup)
        self._sender: _Sender | None = None

    def connect(self, init_info: Mapping[str, Any]) -> None:
        """Says hello to the sender, without waiting for an answer."""
        info = parsed(IpcInit, init_info, "init_info")
        if sys.platform != "linux":
            raise ModelError("ipc needs Linux: choose the weight_transport disk or in_process")
        if info.num_ranks != self.setup.num_ranks:
            raise RequestError(
                f"the sender was made for {info.num_ranks} workers, and the engine has {self.setup.num_ranks}:"
                f" WeightSender(num_ranks={self.setup.num_ranks})"
            )
        self.close()
        self._sender = _Sender(info, self.setup.rank, self.options.timeout_s)

    def receive(self, update_info: Mapping[str, Any]) -> WeightReader:
        update = parsed(IpcUpdate, update_info, "update_info")
        if self._sender is None:
            raise ModelError("no sender is connected: call init_weight_transfer_engine first")
        offsets, memory = self._sender.map(update.bucket)
        tensors: dict[str, torch.Tensor] = {}
        if len(offsets) != len(update.names):
            raise ModelError(f"the segment has {len(offsets)} tensors, and update_info names {len(update.names)}")
        for offset, (name, dtype, shape, num_bytes) in zip(offsets, update.tensors(), strict=True):
            raw = memory[offset : offset + num_bytes]
            if raw.numel() != num_bytes or offset % dtype.itemsize:
                raise ModelError(f"{name} of {num_bytes} bytes is not whole in its segment at byte {offset}")
            tensors[name] = raw.view(dtype).reshape(shape)
        return TensorsReader(tensors)

    def close(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close()


class _Sender:
    """The trainer, as one worker sees it."""

    def __init__(self, info: IpcInit, rank: int, timeout_s: float):
        path = info.address.removeprefix(SCHEME)
        if not info.address.startswith(SCHEME) or not Path(path).is_absolute():
            raise RequestError(f"address is {info.address!r}; WeightSender gives {SCHEME}PATH")
        if not os.path.exists(path):
            raise ModelError(f"nobody listens at {info.address}: the sender is closed, or on another machine")
        self._info, self._rank, self._timeout_s = info, rank, timeout_s
        try:
            self._process = os.pidfd_open(info.pid)
        except OSError as error:
            raise self._gone() from error
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A sender's address is never used again.
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.SNDTIMEO, 0)
        self._end = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._end, zmq.POLLIN)
        self._poller.register(self._process, zmq.POLLIN)
        try:
            self._socket.connect(info.address)
            self._say({})
        except BaseException:
            self.close()
            raise

    def map(self, bucket: int) -> tuple[list[int], torch.Tensor]:
        """Offsets of the tensors, and the bytes of the segment, which stay mapped while a tensor refers to them. Raises
        `ModelError`."""
        handle = self._handle(bucket)
        memory = self._map(handle)
        self._say({"mapped": bucket})
        return handle.offsets, memory

    def close(self) -> None:
        """Once."""
        self._socket.disable_monitor()
        self._end.close()
        self._socket.close()
        self._context.term()
        os.close(self._process)

    def _say(self, message: Mapping[str, int]) -> None:
        body = json.dumps({"connection": self._info.connection, "rank": self._rank, **message}).encode()
        try:
            self._socket.send(body)
        except zmq.Again as error:  # nobody is connected
            raise self._closed() from error

    def _handle(self, bucket: int) -> Handle:
        """That of `bucket`. Those before it belong to updates that were aborted."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            ready = dict(self._poller.poll(max(0, int(1000 * (deadline - time.monotonic())))))
            if self._socket not in ready:
                if self._process in ready:
                    raise self._gone()
                if ready:
                    raise self._closed()
                raise ModelError(f"the sender did not offer bucket {bucket} within timeout_s={self._timeout_s:g}")
            try:
                handle = Handle.model_validate_json(self._socket.recv())
            except ValidationError as error:
                raise ModelError(f"what sends is no WeightSender of this version: {error}") from error
            if handle.bucket > bucket:
                raise ModelError(f"the sender is at bucket {handle.bucket}, and update_info names {bucket}, before it")
            if handle.bucket == bucket:
                return handle

    def _map(self, handle: Handle) -> torch.Tensor:
        try:
            segment = os.open(f"/proc/{self._info.pid}/fd/{handle.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._gone(f" ({error.strerror})") from error
        try:
            # A number of a descriptor may have passed to another file since.
            found = os.readlink(f"/proc/self/fd/{segment}"), os.fstat(segment).st_size
            if found != (f"/memfd:{handle.segment} (deleted)", handle.size):
                raise ModelError(f"the sender has given up bucket {handle.bucket}: send the weights again")
            if not fcntl(segment, F_GET_SEALS) & F_SEAL_SHRINK:
                raise ModelError("the sender's segment could shrink while it is read: use dovetail.rl's WeightSender")
            return torch.frombuffer(mmap.mmap(segment, handle.size, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        finally:
            os.close(segment)

    def _closed(self) -> ModelError:
        return ModelError(
            f"the sender has closed its connection, and its process {self._info.pid} lives on: connect to another with"
            " init_weight_transfer_engine"
        )

    def _gone(self, why: str = "") -> ModelError:
        return ModelError(
            f"the sender, process {self._info.pid}, is gone or belongs to another user{why}: connect again with"
            " init_weight_transfer_engine"
        )
