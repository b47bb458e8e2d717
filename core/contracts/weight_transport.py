"""Weight transport: how the workers of a running engine get new weights, one bucket of named tensors after another.

An engine is updated in four phases, whose names are vLLM's. The host keeps what arrives and writes it at the end, so a
transport only receives. On every rank::

    transport = Transport(options, setup)         at the first phase
    transport.connect(init_info)                  init_weight_transfer_engine
                                                  start_weight_update
    bucket = transport.receive(update_info)       update_weights, once per bucket
                                                  finish_weight_update: the weights change
    transport.close()                             another init_weight_transfer_engine, or the engine's end

Every rank receives every bucket whole: layers cut out their shares when the weights are written.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.contracts.errors import RequestError
from dovetail.contracts.needs import RUNS_ON, among, at_most, compared
from dovetail.contracts.pausing import EngineConflict
from dovetail.contracts.plugin import Plugin, PluginOptions
from dovetail.contracts.weights import WeightReader

if TYPE_CHECKING:
    import torch


class WeightUpdateConflict(EngineConflict):
    """The weights cannot be updated as asked while the engine is as it is. Nothing changed."""


@dataclass(frozen=True, kw_only=True)
class WeightTransportCapabilities:
    """What a transport can do."""

    device_types: frozenset[str] | None = frozenset()
    """Devices of workers that it serves, as torch names them; None: any. Tensors arrive on the CPU in any case."""
    tensor_parallel: int | None = 1
    """Most ranks that it brings each bucket to; None: any number."""
    keeps_tensors: bool = False
    """The tensors of a bucket keep their values until its reader is closed, at the end of the update: the host reads
    them when it writes the weights. Otherwise the host copies a bucket when it arrives, and closes the reader then."""


@dataclass(frozen=True)
class WeightTransportNeed:
    """What the config asks of a transport; the argument of `check`."""

    device_type: str = field(metadata=compared("device_types", among, RUNS_ON))
    tensor_parallel: int = field(
        default=1,
        metadata=compared(
            "tensor_parallel",
            at_most,
            "{name} brings weights to up to {has} tensor-parallel rank, not {asked}: choose another weight_transport.",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class TransportSetup:
    """What a transport gets when it is created."""

    device: torch.device
    """Of the worker."""
    rank: int
    """The worker's number, 0 <= rank < num_ranks."""
    num_ranks: int
    """Workers of the engine, each of which has a transport."""
    open_checkpoint: Callable[[Path], WeightReader]
    """Opens a checkpoint in the weight format of the engine's model. Raises `ModelError`."""


@dataclass(frozen=True, kw_only=True)
class WeightsReport:
    """The weights that an engine has."""

    version: int
    """0 for those that it was loaded with; each update has a higher one than those before."""
    checksum: str
    """BLAKE2b (16 bytes, in hexadecimal) over the tensors of the last update in order of their names, with names,
    dtypes and shapes; after a partial update also over the checksum before. Empty: they were loaded at the start, or
    read again from the checkpoint."""


class WeightTransport(Plugin):
    """Receives tensors. One thread calls it, between steps.

    Errors: `RequestError` for an `init_info` or `update_info` that the transport cannot use; `ModelError` where tensors
    do not arrive whole, the sender is gone, or it stays silent for longer than an option of the transport allows. The
    update then ends, and the weights stay as they were.
    """

    capabilities: ClassVar[WeightTransportCapabilities] = WeightTransportCapabilities()

    def __init__(self, options: PluginOptions, setup: TransportSetup):
        self.options = options
        self.setup = setup

    def connect(self, init_info: Mapping[str, Any]) -> None:
        """Gets ready, and returns once buckets can be received. `init_info` is the caller's, the same on every rank.
        The default takes an empty one."""
        if init_info:
            raise RequestError(f"{type(self).__name__} takes no init_info, got {', '.join(map(str, init_info))}")

    @abstractmethod
    def receive(self, update_info: Mapping[str, Any]) -> WeightReader:
        """Returns one bucket. `update_info` is the caller's, the same on every rank. Tensors have the names, shapes and
        any floating dtype of the model's checkpoint, or of the drafter's for which the bucket is. They lie on the CPU,
        and may be views: the host does not write to them."""

    def close(self) -> None:
        """Gives back what the transport holds. Idempotent."""
        return None
