"""What a worker has before its weights are read: plugins, a device, and the group of its ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from dovetail.config.resolved import ResolvedConfig
from dovetail.contracts.device import Device
from dovetail.contracts.errors import PluginError
from dovetail.contracts.executor import Placement
from dovetail.contracts.logits import LogitsSetup
from dovetail.contracts.model import Communicator
from dovetail.nn.communicator import SingleProcess, TorchDistributed
from dovetail.registry.bootstrap import LoadedPlugins, bootstrap
from dovetail.worker.draft_tokenizers import DraftTokenizers
from dovetail.worker.plain_device import PlainDevice


@dataclass(frozen=True)
class WorkerSetup:
    """One rank, as its model is loaded."""

    config: ResolvedConfig
    placement: Placement
    plugins: LoadedPlugins
    device: Device
    communicator: Communicator
    logits: LogitsSetup | None
    """What logits processors are created with; None where the config names none."""
    tokenizers: DraftTokenizers
    """Those that drafters are handed."""

    @property
    def torch_device(self) -> torch.device:
        """Where weights and KV pages are."""
        return self.device.torch_device


def set_up(
    config: ResolvedConfig, placement: Placement, logits: LogitsSetup | None, tokenizers: DraftTokenizers
) -> WorkerSetup:
    """Loads the plugins of a config and joins the ranks of its layout. Raises `PluginError`."""
    plugins = bootstrap(config.components(), config.plugin_hash)
    runtime = placement.runtime
    device = (PlainDevice if runtime is None else runtime.create_device)(placement.device)
    return WorkerSetup(config, placement, plugins, device, _connect(placement), logits, tokenizers)


def leave_group(placement: Placement) -> None:
    """The end of the communicator. Idempotent."""
    if placement.layout.num_ranks > 1 and dist.is_initialized():
        dist.destroy_process_group()


def _connect(placement: Placement) -> Communicator:
    """Joins the group of all ranks; over it, stages exchange states. Returns the collectives of the worker's stage."""
    layout = placement.layout
    if layout.num_ranks == 1:
        return SingleProcess()
    if placement.init_method is None:
        raise PluginError(
            f"the executor gave rank {placement.rank} of {layout.num_ranks} no init_method, so that the ranks"
            " cannot find each other: choose another executor.name"
        )
    is_cuda = placement.device.startswith("cuda")
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=placement.init_method,
        rank=placement.position,
        world_size=layout.num_ranks,
        # NCCL then connects the ranks at once: a rank that cannot be reached is an error here and not in a capture.
        device_id=torch.device(placement.device) if is_cuda else None,
    )
    if layout.num_stages == 1:
        return TorchDistributed()
    if layout.tensor_parallel == 1:
        return SingleProcess()
    firsts = range(0, layout.num_ranks, layout.tensor_parallel)
    # Every rank makes the groups of all stages, in the same order, as torch.distributed asks for.
    groups = [dist.new_group(list(range(first, first + layout.tensor_parallel))) for first in firsts]
    return TorchDistributed(groups[placement.stage])
