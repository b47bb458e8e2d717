"""The `collective` transport: a trainer broadcasts tensors to the workers of engines on any machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from hashlib import blake2b
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, field_validator
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from dovetail.contracts.errors import ModelError, RequestError
from dovetail.contracts.plugin import PluginOptions
from dovetail.contracts.weight_transport import TransportSetup, WeightTransport, WeightTransportCapabilities
from dovetail.contracts.weights import WeightReader
from dovetail.plugins.weight_transports.announced import Announced, Given, parsed
from dovetail.plugins.weight_transports.tensors import TensorsReader

PREFIX = "dovetail.weights"
DIGEST_BYTES = 16


class CollectiveOptions(PluginOptions):
    """Options of `collective`."""

    backend: str = "gloo"
    """Of torch.distributed."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long the trainer and the other workers may stay silent before a bucket is given up, in seconds."""

    @field_validator("backend")
    @classmethod
    def _known(cls, backend: str) -> str:
        if backend != "gloo":
            why = (
                "it moves tensors between GPUs, and a worker gets its weights in host memory"
                if backend == "nccl"
                else ""
            )
            raise ValueError(f"{backend!r} is not offered{why and ': ' + why}; use gloo")
        return backend


class CollectiveInit(Given):
    """vLLM's `NCCLWeightTransferInitInfo`."""

    master_address: str
    master_port: Annotated[int, Field(gt=0, lt=1 << 16)]
    rank_offset: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=2)]


class CollectiveTransport(WeightTransport):
    """`dovetail.rl.collective_sender.CollectiveSender` is rank 0; it gives `init_info` and `update_info`.

    After a bucket that did not come, trainer and workers may be at different broadcasts: the group is left, and they
    connect again.
    """

    contract: ClassVar[tuple[int, int]] = (1, 0)
    capabilities = WeightTransportCapabilities(device_types=None, tensor_parallel=None)
    Options: ClassVar[type[PluginOptions]] = CollectiveOptions
    options: CollectiveOptions

    def __init__(self, options: CollectiveOptions, setup: TransportSetup):
        super().__init__(options, setup)
        self._group: ProcessGroupGloo | None = None
        self._timeout = timedelta(seconds=options.timeout_s)

    def connect(self, init_info: Mapping[str, Any]) -> None:
        """Returns once the trainer and all workers are there."""
        info = parsed(CollectiveInit, init_info, "init_info")
        if info.rank_offset + self.setup.num_ranks > info.world_size:
            raise RequestError(
                f"world_size is {info.world_size}, and the engine's {self.setup.num_ranks} workers begin at rank"
                f" {info.rank_offset}: it counts the trainer and all workers"
            )
        self.close()
        try:
            store = TCPStore(
                info.master_address, info.master_port, info.world_size, False, self._timeout, wait_for_workers=False
            )
            rank = info.rank_offset + self.setup.rank
            self._group = ProcessGroupGloo(PrefixStore(PREFIX, store), rank, info.world_size, self._timeout)
        except RuntimeError as error:
            raise ModelError(
                f"no group of {info.world_size} at {info.master_address}:{info.master_port} within"
                f" timeout_s={self.options.timeout_s:g}: {error}"
            ) from error

    def receive(self, update_info: Mapping[str, Any]) -> WeightReader:
        update = parsed(Announced, update_info, "update_info")
        group, self._group = self._group, None
        if group is None:
            raise ModelError("no trainer is connected: call init_weight_transfer_engine, with a new CollectiveSender")
        described = {"names": update.names, "dtype_names": update.dtype_names, "shapes": update.shapes}
        digest = blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=DIGEST_BYTES).digest()
        if self._received(group, DIGEST_BYTES).numpy().tobytes() != digest:
            raise ModelError(
                "the trainer sends another bucket than update_info names, since one before it was not received: connect"
                " again, with a new CollectiveSender"
            )
        layout = list(update.tensors())
        content = self._received(group, sum(num_bytes for *_, num_bytes in layout))
        self._group = group
        tensors: dict[str, torch.Tensor] = {}
        begin = 0
        for name, dtype, shape, num_bytes in layout:
            raw = content[begin : begin + num_bytes]
            # A view of another dtype has to begin at a multiple of its size.
            raw = raw.clone() if begin % dtype.itemsize else raw
            tensors[name] = raw.view(dtype).reshape(shape)
            begin += num_bytes
        return TensorsReader(tensors)

    def close(self) -> None:
        self._group = None

    def _received(self, group: ProcessGroupGloo, num_bytes: int) -> torch.Tensor:
        """What rank 0 broadcasts."""
        content = torch.empty(num_bytes, dtype=torch.uint8)
        try:
            # torch's stubs lack the method.
            group.broadcast(content, 0).wait(self._timeout)  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise ModelError(
                f"the trainer or a worker is gone or silent: connect again, with a new CollectiveSender ({error})"
            ) from error
        return content
